// `Lanes`: a register of fp32 values and the operations the kernels need, for AVX-512, for AVX2 + FMA + F16C, and as
// portable loops. All three round alike: same fmas, 16-bit stores to nearest even, NaN kept as a quiet NaN.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define MEGATRAIN_X86 1
#include <immintrin.h>
#endif

namespace {

#if defined(MEGATRAIN_X86) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Lanes {
    using F = __m512;
    using D = __m512d;
    static constexpr int64_t kWidth = 16;
    static constexpr const char* kName = "avx512";

    static F set(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static __m256i load16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store16(uint16_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    static void stream16(uint16_t* p, __m256i x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
    static void fence() { _mm_sfence(); }
    static F load_bf16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(p)), 16));
    }
    static F load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(load16(p)); }

    // Round to nearest even in integers: vcvtneps2bf16 would flush subnormals to zero.
    static __m256i to_bf16(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
        return _mm512_cvtepi32_epi16(high);
    }
    static __m256i to_fp16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static D zero_double() { return _mm512_setzero_pd(); }
    static void add_squares(F x, D& low, D& high) {
        const D a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const D b = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
        low = _mm512_fmadd_pd(a, a, low);
        high = _mm512_fmadd_pd(b, b, high);
    }
    static double sum(D x) { return _mm512_reduce_add_pd(x); }
};

#elif defined(MEGATRAIN_X86)

struct Lanes {
    using F = __m256;
    using D = __m256d;
    static constexpr int64_t kWidth = 8;
    static constexpr const char* kName = "avx2";

    static F set(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static __m128i load16(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static void store16(uint16_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
    static void stream16(uint16_t* p, __m128i x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), x); }
    static void fence() { _mm_sfence(); }
    static F load_bf16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
    }
    static F load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(load16(p)); }

    static __m128i to_bf16(F x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
    static __m128i to_fp16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static D zero_double() { return _mm256_setzero_pd(); }
    static void add_squares(F x, D& low, D& high) {
        const D a = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const D b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        low = _mm256_fmadd_pd(a, a, low);
        high = _mm256_fmadd_pd(b, b, high);
    }
    static double sum(D x) {
        const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
        return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
    }
};

#else

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

uint16_t bf16_of(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float float_of_fp16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31;
    const uint32_t fraction = half & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | (fraction << 13));
    if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

uint16_t fp16_of(float x) {
    const uint32_t bits = bits_of(x);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds past 65504
    if (magnitude < 0x38800000) {                       // subnormal in fp16: steps of 2^-24, exact in fp32
        return sign | static_cast<uint16_t>(std::nearbyint(float_of(magnitude) * 0x1p24f));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}

struct Lanes {
    static constexpr int64_t kWidth = 8;
    static constexpr const char* kName = "portable";
    template <typename T>
    struct Array {
        T lane[kWidth];
    };
    using F = Array<float>;
    using D = Array<double>;
    using H = Array<uint16_t>;

    template <typename R, typename Op>
    static R each(Op op) {
        R result;
        for (int64_t i = 0; i < kWidth; ++i) result.lane[i] = op(i);
        return result;
    }
    static F set(float x) { return each<F>([&](int64_t) { return x; }); }
    static F add(F a, F b) { return each<F>([&](int64_t i) { return a.lane[i] + b.lane[i]; }); }
    static F mul(F a, F b) { return each<F>([&](int64_t i) { return a.lane[i] * b.lane[i]; }); }
    static F fma(F a, F b, F c) {
        return each<F>([&](int64_t i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
    }
    static F div(F a, F b) { return each<F>([&](int64_t i) { return a.lane[i] / b.lane[i]; }); }
    static F sqrt(F a) { return each<F>([&](int64_t i) { return std::sqrt(a.lane[i]); }); }

    static F load(const float* p) { return each<F>([&](int64_t i) { return p[i]; }); }
    static void store(float* p, F x) { std::memcpy(p, x.lane, sizeof x.lane); }
    static void store16(uint16_t* p, H x) { std::memcpy(p, x.lane, sizeof x.lane); }
    static void stream16(uint16_t* p, H x) { store16(p, x); }
    static void fence() {}
    static F load_bf16(const uint16_t* p) {
        return each<F>([&](int64_t i) { return float_of(static_cast<uint32_t>(p[i]) << 16); });
    }
    static F load_fp16(const uint16_t* p) { return each<F>([&](int64_t i) { return float_of_fp16(p[i]); }); }
    static H to_bf16(F x) { return each<H>([&](int64_t i) { return bf16_of(x.lane[i]); }); }
    static H to_fp16(F x) { return each<H>([&](int64_t i) { return fp16_of(x.lane[i]); }); }

    static D zero_double() { return D{}; }
    static void add_squares(F x, D& low, D&) {
        for (int64_t i = 0; i < kWidth; ++i) {
            const double wide = x.lane[i];
            low.lane[i] = std::fma(wide, wide, low.lane[i]);
        }
    }
    static double sum(D x) {
        double total = 0.0;
        for (double lane : x.lane) total += lane;
        return total;
    }
};

#endif

}  // namespace
