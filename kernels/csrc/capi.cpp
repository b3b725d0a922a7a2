#include <exception>
#include <string>

#include "decoder.h"
#include "shoal_native.h"

// The handle of the C interface is the decoder itself.
struct ShoalDecoder : shoal::Decoder {
    using shoal::Decoder::Decoder;
};

namespace {

thread_local std::string last_error;

// Exceptions must not cross the C boundary.
template <class Call>
int guarded(const Call& call) {
    try {
        call();
        return 0;
    } catch (const shoal::LostRank& error) {
        last_error = error.what();
        return -2;
    } catch (const std::exception& error) {
        last_error = error.what();
        return -1;
    }
}

}  // namespace

extern "C" {

ShoalDecoder* shoal_decoder_create(const ShoalShape* shape, const ShoalExchange* exchange) {
    ShoalDecoder* decoder = nullptr;
    guarded([&] { decoder = new ShoalDecoder(*shape, exchange != nullptr ? shoal::make_exchange(*exchange) : nullptr); });
    return decoder;
}

void shoal_decoder_destroy(ShoalDecoder* decoder) { delete decoder; }

int shoal_decoder_set(ShoalDecoder* decoder, int32_t parameter, int32_t layer, const void* data, int64_t count) {
    return guarded([&] { decoder->set_parameter(static_cast<ShoalParameter>(parameter), layer, data, count); });
}

int shoal_decoder_set_integers(ShoalDecoder* decoder, int32_t parameter, int32_t layer, int32_t bits,
                               const uint8_t* values, const uint16_t* scales, const uint16_t* minimums, int64_t count) {
    return guarded([&] {
        const shoal::Integers integers{static_cast<shoal::Format>(bits), values, scales, minimums};
        decoder->set_integers(static_cast<ShoalParameter>(parameter), layer, integers, count);
    });
}

int shoal_decoder_set_rotary(ShoalDecoder* decoder, const float* cos_sin) {
    return guarded([&] { decoder->set_rotary(cos_sin); });
}

int shoal_decoder_step(ShoalDecoder* decoder, const ShoalStep* step, float* values, int64_t* places) {
    return guarded([&] {
        decoder->forward(*step);
        decoder->take_maxima(*step, values, places);
    });
}

int shoal_decoder_copy_blocks(ShoalDecoder* decoder, const int64_t* pairs, int32_t count) {
    return guarded([&] { decoder->copy_blocks(pairs, count); });
}

void shoal_row_maxima(const float* rows, int64_t num_rows, int64_t size, float* values, int64_t* places) {
    static const shoal::Kernels* kernels = shoal::find_kernels(nullptr);
    for (int64_t i = 0; i < num_rows; ++i) {
        const auto [value, place] = kernels->row_maximum(rows + i * size, size);
        values[i] = value;
        places[i] = place;
    }
}

uint64_t shoal_decoder_progress(const ShoalDecoder* decoder) { return decoder->progress(); }

const char* shoal_decoder_kernels(const ShoalDecoder* decoder) { return decoder->kernels_name(); }

const char* shoal_supported_kernels(void) { return shoal::supported_kernels(); }

const char* shoal_error(void) { return last_error.c_str(); }

}  // extern "C"
