// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Marks what libfused_mha exports.
#if defined(_WIN32)
#if defined(FUSED_MHA_BUILDING_LIBRARY)
#define FUSED_MHA_API __declspec(dllexport)
#else
#define FUSED_MHA_API __declspec(dllimport)
#endif
#else
#define FUSED_MHA_API __attribute__((visibility("default")))
#endif
