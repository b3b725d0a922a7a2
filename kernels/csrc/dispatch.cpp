// Chooses among the instruction sets that were built, by what the processor and the system support.
#include <cstring>
#include <string>

#include "kernels.h"

#if defined(SHOAL_HAS_AMX)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(SHOAL_HAS_NEONBF16) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace shoal {

// A compiler that does not know an instruction set may not know how to test the processor for it either, so sets that
// were not built are not mentioned.
#define SHOAL_DECLARE(isa) \
    namespace isa {        \
    extern const Kernels table; \
    }
#if defined(SHOAL_HAS_AMX)
SHOAL_DECLARE(amx)
#endif
#if defined(SHOAL_HAS_AVX512BF16)
SHOAL_DECLARE(avx512bf16)
#endif
#if defined(SHOAL_HAS_AVX512)
SHOAL_DECLARE(avx512)
#endif
#if defined(SHOAL_HAS_AVX2)
SHOAL_DECLARE(avx2)
#endif
#if defined(SHOAL_HAS_NEONBF16)
SHOAL_DECLARE(neonbf16)
#endif
#if defined(SHOAL_HAS_NEON)
SHOAL_DECLARE(neon)
#endif
#if defined(SHOAL_HAS_PORTABLE)
SHOAL_DECLARE(portable)
#endif
#undef SHOAL_DECLARE

namespace {

struct Candidate {
    const Kernels* kernels;
    bool supported;
};

#if defined(SHOAL_HAS_AVX2) || defined(SHOAL_HAS_AVX512) || defined(SHOAL_HAS_AVX512BF16) || defined(SHOAL_HAS_AMX)
bool runs_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif
#if defined(SHOAL_HAS_AVX512) || defined(SHOAL_HAS_AVX512BF16) || defined(SHOAL_HAS_AMX)
bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
#if defined(SHOAL_HAS_AVX512BF16) || defined(SHOAL_HAS_AMX)
bool runs_avx512_bf16() {
    return runs_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif
#if defined(SHOAL_HAS_AMX)
// Linux grants the tile registers on request, to all of a process's threads.
bool runs_amx() {
#if defined(__linux__)
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    constexpr unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE and AMX-INT8
    unsigned a, b, c, d;
    return runs_avx512_bf16() && __builtin_cpu_supports("avx512vbmi") && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
           (d & needed) == needed && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif
#if defined(SHOAL_HAS_NEONBF16)
bool runs_neon_bf16() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
    return false;
#endif
}
#endif

std::vector<const Kernels*> supported() {
    const Candidate candidates[] = {
#if defined(SHOAL_HAS_AMX)
        {&amx::table, runs_amx()},
#endif
#if defined(SHOAL_HAS_AVX512BF16)
        {&avx512bf16::table, runs_avx512_bf16()},
#endif
#if defined(SHOAL_HAS_AVX512)
        {&avx512::table, runs_avx512()},
#endif
#if defined(SHOAL_HAS_AVX2)
        {&avx2::table, runs_avx2()},
#endif
#if defined(SHOAL_HAS_NEONBF16)
        {&neonbf16::table, runs_neon_bf16()},
#endif
#if defined(SHOAL_HAS_NEON)
        {&neon::table, true},
#endif
#if defined(SHOAL_HAS_PORTABLE)
        {&portable::table, true},
#endif
    };
    std::vector<const Kernels*> found;
    for (const Candidate& c : candidates)
        if (c.supported) found.push_back(c.kernels);
    return found;
}

}  // namespace

const Kernels* find_kernels(const char* name) {
    const auto found = supported();
    if (name == nullptr || *name == '\0') return found.front();
    for (const Kernels* k : found)
        if (std::strcmp(k->name, name) == 0) return k;
    return nullptr;
}

const char* supported_kernels() {
    static const std::string names = [] {
        std::string joined;
        for (const Kernels* k : supported()) joined += (joined.empty() ? "" : ",") + std::string(k->name);
        return joined;
    }();
    return names.c_str();
}

}  // namespace shoal
