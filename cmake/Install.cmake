# SPDX-License-Identifier: BSD-3-Clause
#
# Install rules: the library, its public headers, and the package that find_package(FusedMHA) reads.
include(CMakePackageConfigHelpers)

set(_package_folder share/cmake/FusedMHA)
install(TARGETS fused_mha EXPORT FusedMHATargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY csrc/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT FusedMHATargets NAMESPACE FusedMHA:: DESTINATION ${_package_folder})

configure_package_config_file(cmake/FusedMHAConfig.cmake.in "${PROJECT_BINARY_DIR}/FusedMHAConfig.cmake"
                              INSTALL_DESTINATION ${_package_folder})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/FusedMHAConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/FusedMHAConfig.cmake" "${PROJECT_BINARY_DIR}/FusedMHAConfigVersion.cmake"
              cmake/FusedMHATorch.cmake DESTINATION ${_package_folder})
