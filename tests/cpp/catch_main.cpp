// SPDX-License-Identifier: BSD-3-Clause
//
// The main function of the test programs, for Catch2 2, which brings none.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
