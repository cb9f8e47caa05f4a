// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Kernel units are compiled for instruction sets that not every processor has. A plain inline function of a shared
// header could be emitted by such a unit and picked by the linker for everybody, so shared ones are always inlined.
#define FUSED_MHA_INLINE [[gnu::always_inline]] inline

// Functions that CUDA kernels call too.
#ifdef __CUDACC__
#define FUSED_MHA_HOST_DEVICE __host__ __device__
#else
#define FUSED_MHA_HOST_DEVICE
#endif
