// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fused_mha/export.h>

namespace fused_mha {

/// Version of the library that runs, such as "0.1.0".
FUSED_MHA_API const char* version();

namespace detail {

/// Linkers that leave out a library to which nothing refers (--as-needed, the default on Ubuntu) would leave out this
/// one in a program that only names operators, as one that loads a TorchScript file does. This refers to it.
[[maybe_unused]] inline const char* const linked_version = version();

}  // namespace detail
}  // namespace fused_mha
