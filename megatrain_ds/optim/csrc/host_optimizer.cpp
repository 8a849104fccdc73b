// Fused host Adam/AdamW update with a plain C ABI: no torch, no Python, one pass over memory.
//
// Every operand is a flat array of n elements. The arithmetic is written once, against `Lanes`. A remainder shorter
// than a vector goes through padded stack buffers and the same vector code, so a result never depends on an element's
// position or on the number of threads.
//
// Formula and operation order follow DeepSpeedCPUAdam; "fma" marks a product and a sum rounded once.
// Build with -ffp-contract=off: only the fmas written here may be fused.

#ifndef _OPENMP
#error "host_optimizer.cpp needs OpenMP: compile with -fopenmp"
#endif

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lanes.h"

// One update's scalars, in fp32, computed by the caller. Mirrored field by field in native.py.
extern "C" struct MegatrainAdamCoefficients {
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_sqrt_bias2, eps, step_size, decay;
    int32_t decay_mode;
};

namespace {

enum ElementType : int32_t { kNone = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

template <int32_t Type>
struct Element {
    using type = uint16_t;
};
template <>
struct Element<kFloat32> {
    using type = float;
};
template <int32_t Type>
using element_t = typename Element<Type>::type;

using F = Lanes::F;
constexpr int64_t kWidth = Lanes::kWidth;

template <int32_t Type>
F load_as_float(const element_t<Type>* p) {
    if constexpr (Type == kFloat32) return Lanes::load(p);
    else if constexpr (Type == kBFloat16) return Lanes::load_bf16(p);
    else return Lanes::load_fp16(p);
}

template <int32_t Type>
void store_rounded(element_t<Type>* p, F x) {
    if constexpr (Type == kFloat32) Lanes::store(p, x);
    else if constexpr (Type == kBFloat16) Lanes::store16(p, Lanes::to_bf16(x));
    else Lanes::store16(p, Lanes::to_fp16(x));
}

// Past the caches: a line that is only written is then never read from memory. `p` must be aligned to a whole store.
template <int32_t Type>
void stream_rounded(element_t<Type>* p, F x) {
    if constexpr (Type == kBFloat16) Lanes::stream16(p, Lanes::to_bf16(x));
    else Lanes::stream16(p, Lanes::to_fp16(x));
}

// Elements a thread takes at least: waking it costs more than a smaller share saves. A multiple of every vector width,
// so that only the last range has a remainder.
constexpr int64_t kGrain = 16 * 1024;

// Splits [0, n) into one contiguous range per thread, at multiples of `grain`, and runs body(begin, end) on each.
template <typename Body>
void parallel_ranges(int64_t n, int64_t grain, int threads, Body body) {
    const int64_t blocks = (n + grain - 1) / grain;
    const int team = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, blocks)));
#pragma omp parallel num_threads(team)
    {
        // The runtime may grant fewer threads than asked for: divide by what it granted.
        const int64_t granted = omp_get_num_threads();
        const int64_t rank = omp_get_thread_num();
        const int64_t begin = blocks * rank / granted * grain;
        const int64_t end = std::min(n, blocks * (rank + 1) / granted * grain);
        if (begin < end) body(begin, end);
    }
}

// ---- Adam ----

enum DecayMode : int32_t { kNoDecay = 0, kDecoupled = 1, kL2 = 2 };

struct AdamVectors {
    F grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_sqrt_bias2, eps, step_size, decay;
    int32_t decay_mode;

    explicit AdamVectors(const MegatrainAdamCoefficients& c)
        : grad_scale(Lanes::set(c.grad_scale)),
          beta1(Lanes::set(c.beta1)),
          one_minus_beta1(Lanes::set(c.one_minus_beta1)),
          beta2(Lanes::set(c.beta2)),
          one_minus_beta2(Lanes::set(c.one_minus_beta2)),
          inverse_sqrt_bias2(Lanes::set(c.inverse_sqrt_bias2)),
          eps(Lanes::set(c.eps)),
          step_size(Lanes::set(c.step_size)),
          decay(Lanes::set(c.decay)),
          decay_mode(c.decay_mode) {}
};

template <int32_t GradType, int32_t ComputeType>
struct AdamOperands {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    const element_t<GradType>* grad;
    element_t<ComputeType>* compute;
};

// What one pass writes. kWeights computes the new moments without writing them, kMoments writes them from the same
// gradients and old moments by the same operations: both passes together give the bits of kAll. With kL2 the gradient
// depends on the old master, so that only kAll is right.
enum UpdatePart : int32_t { kAll = 0, kWeights = 1, kMoments = 2 };

// Updates elements [i, i + Span * kWidth). Loads of all vectors come first, so that more of them are in flight.
template <int32_t Part, int Span, bool Stream, int32_t GradType, int32_t ComputeType>
inline void adam_vectors(const AdamOperands<GradType, ComputeType>& x, int64_t i, const AdamVectors& c) {
    F param[Span], grad[Span], momentum[Span], variance[Span];
    for (int k = 0; k < Span; ++k) grad[k] = load_as_float<GradType>(x.grad + i + k * kWidth);
    for (int k = 0; k < Span; ++k) momentum[k] = Lanes::load(x.exp_avg + i + k * kWidth);
    for (int k = 0; k < Span; ++k) variance[k] = Lanes::load(x.exp_avg_sq + i + k * kWidth);
    if constexpr (Part != kMoments) {
        for (int k = 0; k < Span; ++k) param[k] = Lanes::load(x.master + i + k * kWidth);
    }

    for (int k = 0; k < Span; ++k) {
        grad[k] = Lanes::mul(grad[k], c.grad_scale);
        if constexpr (Part == kAll) {
            if (c.decay_mode == kL2) grad[k] = Lanes::fma(param[k], c.decay, grad[k]);
        }
        momentum[k] = Lanes::fma(grad[k], c.one_minus_beta1, Lanes::mul(momentum[k], c.beta1));
        variance[k] = Lanes::fma(Lanes::mul(grad[k], grad[k]), c.one_minus_beta2, Lanes::mul(variance[k], c.beta2));
        if constexpr (Part == kMoments) continue;
        const F denominator = Lanes::fma(Lanes::sqrt(variance[k]), c.inverse_sqrt_bias2, c.eps);
        if (c.decay_mode == kDecoupled) param[k] = Lanes::fma(param[k], c.decay, param[k]);
        param[k] = Lanes::fma(Lanes::div(momentum[k], denominator), c.step_size, param[k]);
    }

    if constexpr (Part != kWeights) {
        for (int k = 0; k < Span; ++k) Lanes::store(x.exp_avg + i + k * kWidth, momentum[k]);
        for (int k = 0; k < Span; ++k) Lanes::store(x.exp_avg_sq + i + k * kWidth, variance[k]);
    }
    if constexpr (Part != kMoments) {
        for (int k = 0; k < Span; ++k) Lanes::store(x.master + i + k * kWidth, param[k]);
    }
    if constexpr (Part != kMoments && ComputeType != kNone) {
        for (int k = 0; k < Span; ++k) {
            if constexpr (Stream) stream_rounded<ComputeType>(x.compute + i + k * kWidth, param[k]);
            else store_rounded<ComputeType>(x.compute + i + k * kWidth, param[k]);
        }
    }
}

// The last n < kWidth elements, through padded copies. Zero padding with eps 0 gives NaN in lanes nobody reads.
template <int32_t Part, int32_t GradType, int32_t ComputeType>
void adam_remainder(const AdamOperands<GradType, ComputeType>& x, int64_t begin, int64_t n, const AdamVectors& c) {
    float master[kWidth] = {}, exp_avg[kWidth] = {}, exp_avg_sq[kWidth] = {};
    element_t<GradType> grad[kWidth] = {};
    element_t<ComputeType> compute[kWidth] = {};
    std::copy_n(x.master + begin, n, master);
    std::copy_n(x.exp_avg + begin, n, exp_avg);
    std::copy_n(x.exp_avg_sq + begin, n, exp_avg_sq);
    std::copy_n(x.grad + begin, n, grad);
    adam_vectors<Part, 1, false, GradType, ComputeType>({master, exp_avg, exp_avg_sq, grad, compute}, 0, c);
    if constexpr (Part != kWeights) {
        std::copy_n(exp_avg, n, x.exp_avg + begin);
        std::copy_n(exp_avg_sq, n, x.exp_avg_sq + begin);
    }
    if constexpr (Part != kMoments) std::copy_n(master, n, x.master + begin);
    if constexpr (Part != kMoments && ComputeType != kNone) std::copy_n(compute, n, x.compute + begin);
}

template <int32_t Part, bool Stream, int32_t GradType, int32_t ComputeType>
void adam_range(const AdamOperands<GradType, ComputeType>& x, int64_t begin, int64_t end, const AdamVectors& c) {
    constexpr int kSpan = 4;
    int64_t i = begin;
    for (; i + kSpan * kWidth <= end; i += kSpan * kWidth) adam_vectors<Part, kSpan, Stream>(x, i, c);
    for (; i + kWidth <= end; i += kWidth) adam_vectors<Part, 1, false>(x, i, c);
    if (i < end) adam_remainder<Part>(x, i, end - i, c);
    // Streaming stores are weakly ordered: without the fence a copy engine could read the old compute copy.
    if constexpr (Stream) Lanes::fence();
}

// Below this many elements the compute copy is left in the caches, where a forward on the host finds it.
constexpr int64_t kStreamFrom = 1 << 20;

template <int32_t Part, int32_t GradType, int32_t ComputeType>
void adam_part(const AdamOperands<GradType, ComputeType>& x, int64_t n, const MegatrainAdamCoefficients& scalars,
          int threads) {
    const bool aligned = reinterpret_cast<uintptr_t>(x.compute) % (kWidth * sizeof(uint16_t)) == 0;
    const bool stream = ComputeType != kNone && aligned && n >= kStreamFrom;
    parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
        const AdamVectors c(scalars);
        if constexpr (ComputeType != kNone) {
            if (stream) return adam_range<Part, true>(x, begin, end, c);
        }
        adam_range<Part, false>(x, begin, end, c);
    });
}

template <int32_t GradType, int32_t ComputeType>
int32_t adam(const AdamOperands<GradType, ComputeType>& x, int64_t n, const MegatrainAdamCoefficients& scalars,
             int32_t part, int threads) {
    if (part != kAll && scalars.decay_mode == kL2) return 1;
    switch (part) {
        case kAll: adam_part<kAll>(x, n, scalars, threads); return 0;
        case kWeights: adam_part<kWeights>(x, n, scalars, threads); return 0;
        // The compute copy plays no part in it: one instance for all its types.
        case kMoments:
            adam_part<kMoments, GradType, kNone>({x.master, x.exp_avg, x.exp_avg_sq, x.grad, nullptr}, n, scalars,
                                                 threads);
            return 0;
        default: return 1;
    }
}

// ---- gradient accumulation ----

template <int32_t AccumulatorType, int32_t GradType>
inline void accumulate_vector(element_t<AccumulatorType>* accumulator, const element_t<GradType>* grad,
                              bool overwrite) {
    F value = load_as_float<GradType>(grad);
    if (!overwrite) value = Lanes::add(load_as_float<AccumulatorType>(accumulator), value);
    store_rounded<AccumulatorType>(accumulator, value);
}

template <int32_t AccumulatorType, int32_t GradType>
void accumulate(void* accumulator_bytes, const void* grad_bytes, int64_t n, bool overwrite, int threads) {
    auto* accumulator = static_cast<element_t<AccumulatorType>*>(accumulator_bytes);
    const auto* grad = static_cast<const element_t<GradType>*>(grad_bytes);
    parallel_ranges(n, kGrain, threads, [=](int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i + kWidth <= end; i += kWidth) {
            accumulate_vector<AccumulatorType, GradType>(accumulator + i, grad + i, overwrite);
        }
        if (i == end) return;
        element_t<AccumulatorType> old[kWidth] = {};
        element_t<GradType> last[kWidth] = {};
        std::copy(accumulator + i, accumulator + end, old);
        std::copy(grad + i, grad + end, last);
        accumulate_vector<AccumulatorType, GradType>(old, last, overwrite);
        std::copy_n(old, end - i, accumulator + i);
    });
}

// ---- sum of squares ----

// Partial sums belong to fixed blocks and are added in order, so the result does not depend on the thread count.
constexpr int64_t kSumBlock = 1 << 16;

template <int32_t Type>
double block_sum_of_squares(const element_t<Type>* x, int64_t n) {
    Lanes::D sums[4] = {Lanes::zero_double(), Lanes::zero_double(), Lanes::zero_double(), Lanes::zero_double()};
    int64_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
        Lanes::add_squares(load_as_float<Type>(x + i), sums[0], sums[1]);
        Lanes::add_squares(load_as_float<Type>(x + i + kWidth), sums[2], sums[3]);
    }
    element_t<Type> last[2 * kWidth] = {};
    std::copy(x + i, x + n, last);
    Lanes::add_squares(load_as_float<Type>(last), sums[0], sums[1]);
    Lanes::add_squares(load_as_float<Type>(last + kWidth), sums[2], sums[3]);
    return (Lanes::sum(sums[0]) + Lanes::sum(sums[1])) + (Lanes::sum(sums[2]) + Lanes::sum(sums[3]));
}

template <int32_t Type>
double sum_of_squares(const void* bytes, int64_t n, int threads) {
    const auto* x = static_cast<const element_t<Type>*>(bytes);
    std::vector<double> partial(static_cast<size_t>((n + kSumBlock - 1) / kSumBlock));
    parallel_ranges(n, kSumBlock, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += kSumBlock) {
            const int64_t length = std::min(kSumBlock, end - i);
            partial[static_cast<size_t>(i / kSumBlock)] = block_sum_of_squares<Type>(x + i, length);
        }
    });
    double total = 0.0;
    for (double value : partial) total += value;
    return total;
}

}  // namespace

// ---- C ABI: the element types and layouts are checked by the caller; an unknown code returns 1 and does nothing ----

#define MEGATRAIN_EXPORT extern "C" __attribute__((visibility("default")))

MEGATRAIN_EXPORT const char* megatrain_instruction_set() { return Lanes::kName; }

MEGATRAIN_EXPORT int32_t megatrain_adam(float* master, float* exp_avg, float* exp_avg_sq, const void* grad,
                                        int32_t grad_type, void* compute, int32_t compute_type, int64_t n,
                                        const MegatrainAdamCoefficients* coefficients, int32_t part,
                                        int32_t threads) {
#define MEGATRAIN_CASE(G, C)                                                                                \
    case (G) * 4 + (C):                                                                                     \
        return adam<G, C>({master, exp_avg, exp_avg_sq, static_cast<const element_t<G>*>(grad),             \
                           static_cast<element_t<C>*>(compute)},                                            \
                          n, *coefficients, part, threads);
    switch (grad_type * 4 + compute_type) {
        MEGATRAIN_CASE(kFloat32, kNone)
        MEGATRAIN_CASE(kFloat32, kBFloat16)
        MEGATRAIN_CASE(kFloat32, kFloat16)
        MEGATRAIN_CASE(kBFloat16, kNone)
        MEGATRAIN_CASE(kBFloat16, kBFloat16)
        MEGATRAIN_CASE(kBFloat16, kFloat16)
        MEGATRAIN_CASE(kFloat16, kNone)
        MEGATRAIN_CASE(kFloat16, kBFloat16)
        MEGATRAIN_CASE(kFloat16, kFloat16)
        default: return 1;
    }
#undef MEGATRAIN_CASE
}

MEGATRAIN_EXPORT int32_t megatrain_accumulate(void* accumulator, int32_t accumulator_type, const void* grad,
                                              int32_t grad_type, int64_t n, int32_t overwrite, int32_t threads) {
#define MEGATRAIN_CASE(A, G) \
    case (A) * 4 + (G): accumulate<A, G>(accumulator, grad, n, overwrite != 0, threads); return 0;
    switch (accumulator_type * 4 + grad_type) {
        MEGATRAIN_CASE(kFloat32, kFloat32)
        MEGATRAIN_CASE(kFloat32, kBFloat16)
        MEGATRAIN_CASE(kFloat32, kFloat16)
        MEGATRAIN_CASE(kBFloat16, kBFloat16)
        MEGATRAIN_CASE(kFloat16, kFloat16)
        default: return 1;
    }
#undef MEGATRAIN_CASE
}

MEGATRAIN_EXPORT int32_t megatrain_sum_of_squares(const void* grad, int32_t grad_type, int64_t n, double* result,
                                                  int32_t threads) {
    switch (grad_type) {
        case kFloat32: *result = sum_of_squares<kFloat32>(grad, n, threads); return 0;
        case kBFloat16: *result = sum_of_squares<kBFloat16>(grad, n, threads); return 0;
        case kFloat16: *result = sum_of_squares<kFloat16>(grad, n, threads); return 0;
        default: return 1;
    }
}

// Writes one byte of every page with its own value, atomically: the page is allocated near the thread that touched
// it, and a concurrent writer of the same byte loses nothing.
MEGATRAIN_EXPORT int32_t megatrain_prefault(uint8_t* block, int64_t n, int32_t threads) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    parallel_ranges(n, page, threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += page) __atomic_fetch_or(block + i, 0, __ATOMIC_RELAXED);
        __atomic_fetch_or(block + end - 1, 0, __ATOMIC_RELAXED);
    });
    return 0;
}
