// Chooses among the instruction sets that were built, by what the processor and the system support.
#include <cstring>
#include <string>

#include "kernels.h"

#if defined(SHOAL_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace shoal {

#define SHOAL_DECLARE(isa) \
    namespace isa {        \
    extern const Kernels table; \
    }
#if defined(SHOAL_X86)
SHOAL_DECLARE(avx512bf16)
SHOAL_DECLARE(avx512)
SHOAL_DECLARE(avx2)
SHOAL_DECLARE(portable)
#elif defined(SHOAL_ARM)
SHOAL_DECLARE(neonbf16)
SHOAL_DECLARE(neon)
#else
SHOAL_DECLARE(portable)
#endif
#undef SHOAL_DECLARE

namespace {

struct Candidate {
    const Kernels* kernels;
    bool supported;
};

std::vector<const Kernels*> supported() {
#if defined(SHOAL_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const Candidate candidates[] = {
        {&avx512bf16::table, avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")},
        {&avx512::table, avx512},
        {&avx2::table, avx2},
        {&portable::table, true},
    };
#elif defined(SHOAL_ARM)
#if defined(__linux__)
    const bool bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
    const bool bf16 = false;
#endif
    const Candidate candidates[] = {{&neonbf16::table, bf16}, {&neon::table, true}};
#else
    const Candidate candidates[] = {{&portable::table, true}};
#endif
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
