// SPDX-License-Identifier: BSD-3-Clause
//
// Catch2 3 or 2, whichever is installed. To be included after torch.
#pragma once

#include <string>

// torch's logging header has a macro of this name too.
#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>  // IWYU pragma: export
inline auto contains(const std::string& text) { return Catch::Matchers::ContainsSubstring(text); }
#else
#include <catch2/catch.hpp>  // IWYU pragma: export
inline auto contains(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif
