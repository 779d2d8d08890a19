// Which kernels this machine can run. The numbers of the sets are those of cpu_build.py.
#pragma once

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stepwire {

enum InstructionSet : int64_t { kAmx, kAvx512, kAvx2, kPortable };

#if defined(__x86_64__)
inline bool has_avx2() {
  static const bool result = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  return result;
}

inline bool has_avx512() {
  static const bool result = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bf16") &&
                             __builtin_cpu_supports("avx512vnni");
  return result;
}

// The operating system hands out the large state of the tile unit only to processes that ask.
inline bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool result = has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                             __builtin_cpu_supports("amx-int8") &&
                             syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return result;
#else
  return false;
#endif
}
#endif

// Null where the library has no kernels of that set, or the machine lacks the instructions.
inline const Kernels* find_kernels(int64_t instruction_set, bool is_bfloat16) {
  if (instruction_set == kPortable) return portable_kernels(is_bfloat16);
#if defined(__x86_64__)
  if (instruction_set == kAmx && has_amx()) return amx_kernels(is_bfloat16);
  if (instruction_set == kAvx512 && has_avx512()) return avx512_kernels(is_bfloat16);
  if (instruction_set == kAvx2 && has_avx2()) return avx2_kernels(is_bfloat16);
#endif
  return nullptr;
}

}  // namespace stepwire
