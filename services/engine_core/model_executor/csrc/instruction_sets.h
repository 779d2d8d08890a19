// Which kernels this machine can run. The numbers of the sets are those of cpu_build.py.
#pragma once

#include "kernels.h"

namespace stepwire {

enum InstructionSet : int64_t { kAvx512, kAvx2, kPortable };

// Null where the library has no kernels of that set, or the machine lacks the instructions.
inline const Kernels* find_kernels(int64_t instruction_set, bool is_bfloat16) {
  if (instruction_set == kPortable) return portable_kernels(is_bfloat16);
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                               __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                 __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bf16");
  if (instruction_set == kAvx512 && has_avx512) return avx512_kernels(is_bfloat16);
  if (instruction_set == kAvx2 && has_avx2) return avx2_kernels(is_bfloat16);
#endif
  return nullptr;
}

}  // namespace stepwire
