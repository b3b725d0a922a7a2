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

template <class Work>
void for_each_row(ShoalDecoder* decoder, int64_t num_rows, const Work& work) {
    if (decoder != nullptr) return decoder->for_each_row(num_rows, work);
    for (int64_t i = 0; i < num_rows; ++i) work(static_cast<int>(i));
}

const shoal::Kernels* best_kernels() {
    static const shoal::Kernels* const kernels = shoal::find_kernels(nullptr);
    return kernels;
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
                               int32_t activation_bits, const uint8_t* values, const uint16_t* scales,
                               const uint16_t* minimums, int64_t count) {
    return guarded([&] {
        const shoal::Integers integers{static_cast<shoal::Format>(bits), activation_bits, values, scales, minimums};
        decoder->set_integers(static_cast<ShoalParameter>(parameter), layer, integers, count);
    });
}

int shoal_decoder_set_rotary(ShoalDecoder* decoder, int32_t table, const float* cos_sin) {
    return guarded([&] { decoder->set_rotary(static_cast<ShoalRotary>(table), cos_sin); });
}

int shoal_decoder_set_layer(ShoalDecoder* decoder, int32_t layer, int32_t has_window, int32_t rotary) {
    return guarded([&] { decoder->set_layer(layer, has_window != 0, static_cast<ShoalRotary>(rotary)); });
}

int shoal_decoder_add_adapter(ShoalDecoder* decoder) {
    int slot = -1;
    guarded([&] { slot = decoder->add_adapter(); });
    return slot;
}

int shoal_decoder_set_factors(ShoalDecoder* decoder, int32_t slot, int32_t parameter, int32_t layer, int32_t rank,
                              const void* down, const void* up) {
    return guarded([&] { decoder->set_factors(slot, static_cast<ShoalParameter>(parameter), layer, rank, down, up); });
}

int shoal_decoder_remove_adapter(ShoalDecoder* decoder, int32_t slot) {
    return guarded([&] { decoder->remove_adapter(slot); });
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

int64_t shoal_decoder_block_bytes(const ShoalDecoder* decoder) { return decoder->block_bytes(); }

void shoal_decoder_read_blocks(const ShoalDecoder* decoder, const int64_t* blocks, int32_t count, void* contents) {
    decoder->read_blocks(blocks, count, static_cast<shoal::Word*>(contents));
}

void shoal_decoder_write_blocks(ShoalDecoder* decoder, const int64_t* blocks, int32_t count, const void* contents) {
    decoder->write_blocks(blocks, count, static_cast<const shoal::Word*>(contents));
}

void shoal_row_maxima(const float* rows, int64_t num_rows, int64_t size, float* values, int64_t* places) {
    for (int64_t i = 0; i < num_rows; ++i) {
        const auto [value, place] = best_kernels()->row_maximum(rows + i * size, size);
        values[i] = value;
        places[i] = place;
    }
}

int shoal_draw(ShoalDecoder* decoder, const float* logits, int64_t size, const int64_t* numbers, int64_t count,
               const ShoalDraw* draws, int64_t* places) {
    return guarded([&] {
        const auto& kernels = decoder != nullptr ? decoder->kernels() : *best_kernels();
        for_each_row(decoder, count,
                     [&](int i) { places[i] = kernels.draw(logits + numbers[i] * size, size, draws[i]); });
    });
}

int shoal_log_probabilities(ShoalDecoder* decoder, const float* logits, int64_t size, const int64_t* numbers,
                            int64_t count, const int64_t* places, const int64_t* num_top, int64_t stride, float* values,
                            int64_t* top_places, float* top_values) {
    return guarded([&] {
        const auto& kernels = decoder != nullptr ? decoder->kernels() : *best_kernels();
        for_each_row(decoder, count, [&](int i) {
            values[i] = kernels.log_probabilities(logits + numbers[i] * size, size, places[i], num_top[i],
                                                  top_places + i * stride, top_values + i * stride);
        });
    });
}

uint64_t shoal_decoder_progress(const ShoalDecoder* decoder) { return decoder->progress(); }

const char* shoal_decoder_kernels(const ShoalDecoder* decoder) { return decoder->kernels_name(); }

const char* shoal_supported_kernels(void) { return shoal::supported_kernels(); }

const char* shoal_error(void) { return last_error.c_str(); }

}  // extern "C"

const int64_t* shoal_struct_bytes(void) {
    static const int64_t bytes[] = {sizeof(ShoalShape), sizeof(ShoalStep), sizeof(ShoalExchange)};
    return bytes;
}
