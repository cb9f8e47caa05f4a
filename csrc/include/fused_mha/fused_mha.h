// SPDX-License-Identifier: BSD-3-Clause
//
// Masked multi-head attention for LibTorch: include this one.
#pragma once

#include <fused_mha/additive_attention.h>
#include <fused_mha/attention.h>
#include <fused_mha/multihead_attention.h>
