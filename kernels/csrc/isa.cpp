// The kernels of one instruction set. Compiled once for each, with SHOAL_ISA its name and the compiler flags it needs.
#include "attention.h"
#include "gemm.h"
#include "maximum.h"
#include "rotary.h"

#define SHOAL_TEXT_OF(x) #x
#define SHOAL_TEXT(x) SHOAL_TEXT_OF(x)

namespace shoal {
namespace SHOAL_ISA {

extern const Kernels table;
const Kernels table{SHOAL_TEXT(SHOAL_ISA), gemm, round_row, rms_norm, rotary, attention, row_maximum, merge};

}  // namespace SHOAL_ISA
}  // namespace shoal
