// The kernels of one instruction set. Compiled once per set, with SHOAL_ISA as its name and the compiler flags it
// needs.
#include "attention.h"
#include "gemm.h"
#include "gemm_tiles.h"
#include "lora_rows.h"
#include "maximum.h"
#include "rotary.h"
#include "sampling.h"

#define SHOAL_TEXT_OF(x) #x
#define SHOAL_TEXT(x) SHOAL_TEXT_OF(x)

namespace shoal {
namespace SHOAL_ISA {

// screened_rows: measured on a head of 49 152 columns of 576 inputs; 0 for sets that were not measured.
#if defined(__AMX_BF16__)
constexpr auto kGemm = gemm_by_tiles;
constexpr int kRowChunk = 640, kLeastRows = 40, kScreenedRows = 8;
constexpr bool kCodes = true;
#else
constexpr auto kGemm = gemm;
constexpr int kRowChunk = 120, kLeastRows = 16;
constexpr bool kCodes = false;
#if defined(__AVX512BF16__)
constexpr int kScreenedRows = 4;
#elif defined(__AVX512F__)
constexpr int kScreenedRows = 2;
#elif defined(__AVX2__)
constexpr int kScreenedRows = 4;
#else
constexpr int kScreenedRows = 0;
#endif
#endif

extern const Kernels table;
const Kernels table{SHOAL_TEXT(SHOAL_ISA), kGemm, round_row, rms_norm, add_rms_norm, rotary, attention, row_maximum,
                    draw, log_probabilities, merge, narrow, gate, kUnitRows, kRowChunk, kLeastRows, kScreenedRows,
                    kMultipliesBytes, kCodes};

}  // namespace SHOAL_ISA
}  // namespace shoal
