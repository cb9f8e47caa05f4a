# SPDX-License-Identifier: BSD-3-Clause
#
# cmake -DNM=nm -DISA=name -DOBJECT=file -P check_symbols.cmake: fails where a kernel unit defines a function that the
# linker could choose for everybody (a weak symbol) outside its own namespace. Such a function is compiled for ISA and would
# crash older processors. So would an initializer: it runs when the library is loaded.
execute_process(COMMAND ${NM} -C --defined-only ${OBJECT} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[0-9a-f]+ [WVu] [^\n]+" weak "${symbols}")
list(FILTER weak EXCLUDE REGEX "fused_mha::cpu::${ISA}::")
if(weak)
  list(JOIN weak "\n  " text)
  message(FATAL_ERROR "${OBJECT} shares functions with the rest of the library:\n  ${text}")
endif()
if(symbols MATCHES "_GLOBAL__sub_I|__static_initialization")
  message(FATAL_ERROR "${OBJECT} has a dynamic initializer")
endif()
string(FIND "${symbols}" "fused_mha::cpu::kernels_${ISA}()" found)
if(found EQUAL -1)
  message(FATAL_ERROR "${OBJECT} does not define kernels_${ISA}: the wrong file was looked at")
endif()
message(STATUS "${ISA}: no shared functions")
