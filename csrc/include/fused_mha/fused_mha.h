// SPDX-License-Identifier: BSD-3-Clause
//
// Masked multi-head attention for LibTorch: include this one. That alone makes the linker keep the library, which
// registers the operators torch.ops.fused_mha.*.
#pragma once

#include <fused_mha/additive_attention.h>
#include <fused_mha/attention.h>
#include <fused_mha/multihead_attention.h>
#include <fused_mha/version.h>
