// float16 and bfloat16 to float32 and back, a vector at a time, rounding to the nearest, ties to
// even.
//
// Included by kernels.cc only: the code differs between instruction sets, so nothing here may have
// external linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

struct Float16 {
  std::uint16_t bits;
};

struct Bfloat16 {
  std::uint16_t bits;
};

#if defined(__AVX2__)
constexpr std::size_t kLanes = 8;
#else
constexpr std::size_t kLanes = 4;
#endif
using Floats [[gnu::vector_size(4 * kLanes)]] = float;
using Words [[gnu::vector_size(4 * kLanes)]] = std::uint32_t;
using Integers [[gnu::vector_size(4 * kLanes)]] = std::int32_t;
using Shorts [[gnu::vector_size(2 * kLanes)]] = std::uint16_t;

#define UNISONO_INLINE [[gnu::always_inline]] inline

UNISONO_INLINE Words bitsOf(Floats values) { return reinterpret_cast<Words>(values); }
UNISONO_INLINE Floats floatsOf(Words bits) { return reinterpret_cast<Floats>(bits); }

// For magnitudes, which have no sign bit: compared as signed numbers, as the processors can.
UNISONO_INLINE Integers isLess(Words magnitudes, std::int32_t limit) {
  return reinterpret_cast<Integers>(magnitudes) < limit;
}

// By hand, for compilers turn __builtin_convertvector into one move for each lane.
#if defined(__AVX2__)

UNISONO_INLINE Words toWords(Shorts values) {
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(values)));
}

UNISONO_INLINE Shorts toShorts(Words values) {
  const __m256i words = reinterpret_cast<__m256i>(values);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0b1000);
  return reinterpret_cast<Shorts>(_mm256_castsi256_si128(halves));
}

#elif defined(__SSE2__)

UNISONO_INLINE Words toWords(Shorts values) {
  const __m128i shorts = _mm_cvtsi64_si128(reinterpret_cast<long long>(values));
  return reinterpret_cast<Words>(_mm_unpacklo_epi16(shorts, _mm_setzero_si128()));
}

UNISONO_INLINE Shorts toShorts(Words values) {
  // The pack saturates signed numbers, so the sign is spread first.
  const __m128i words = _mm_srai_epi32(_mm_slli_epi32(reinterpret_cast<__m128i>(values), 16), 16);
  return reinterpret_cast<Shorts>(_mm_cvtsi128_si64(_mm_packs_epi32(words, words)));
}

#else

UNISONO_INLINE Words toWords(Shorts values) { return __builtin_convertvector(values, Words); }
UNISONO_INLINE Shorts toShorts(Words values) { return __builtin_convertvector(values, Shorts); }

#endif

UNISONO_INLINE Floats loadLanes(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

UNISONO_INLINE void storeLanes(float* to, Floats values) {
  std::memcpy(to, &values, sizeof values);
}

UNISONO_INLINE Floats loadLanes(const Bfloat16* from) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  return floatsOf(toWords(bits) << 16);
}

UNISONO_INLINE void storeLanes(Bfloat16* to, Floats values) {
  const Words bits = bitsOf(values);
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words quiet_nan = bits | 0x400000;
  const Words narrowed = values != values ? quiet_nan : rounded;
  const Shorts stored = toShorts(narrowed >> 16);
  std::memcpy(to, &stored, sizeof stored);
}

#if defined(__F16C__)

UNISONO_INLINE Floats loadLanes(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

UNISONO_INLINE void storeLanes(Float16* to, Floats values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

#else

UNISONO_INLINE Floats loadLanes(const Float16* from) {
  Shorts stored;
  std::memcpy(&stored, from, sizeof stored);
  const Words bits = toWords(stored);
  // No subnormal float32 appears on the way, so a flush-to-zero mode of the caller changes nothing.
  const Words magnitude = (bits & 0x7fff) << 13;
  const Words normal = magnitude + (112u << 23);
  const Words subnormal = bitsOf(floatsOf(normal + (1u << 23)) - 0x1p-14f);
  const Words finite = isLess(magnitude, 1 << 23) ? subnormal : normal;
  const Words widened = isLess(magnitude, 31 << 23) ? finite : normal + (112u << 23);
  return floatsOf(widened | (bits & 0x8000) << 16);
}

UNISONO_INLINE void storeLanes(Float16* to, Floats values) {
  const Words bits = bitsOf(values);
  const Words magnitude = bits & 0x7fffffff;
  // The last place of 0.5 is 2^-24, that of a subnormal float16: the addition rounds to it.
  const Words subnormal = bitsOf(floatsOf(magnitude) + 0.5f) - (126u << 23);
  const Words normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Words finite = isLess(magnitude, 113 << 23) ? subnormal : normal;
  const Words special = values != values ? Words{} + 0x7e00 : Words{} + 0x7c00;
  const Words narrowed = isLess(magnitude, 143 << 23) ? finite : special;
  const Shorts stored = toShorts(narrowed | (bits >> 16 & 0x8000));
  std::memcpy(to, &stored, sizeof stored);
}

#endif

}  // namespace
