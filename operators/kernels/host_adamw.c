/* AdamW on host memory in one pass: gradients are read and weights written as bf16 (or fp32) where they lie.
 *
 * Per parameter it reads 12 bytes of state and the gradient, and writes 12 bytes of state and the weight:
 * nothing is converted in a pass of its own, since host memory traffic is what limits this update. Weights are
 * only written, so they go past the caches: a plain store would read each line first.
 *
 * The order of operations, and which products are fused into additions, are those of torch's fused CPU AdamW:
 * whole groups of 8 elements its vector form, the last n % 8 its scalar form. Compile with -ffp-contract=off, or
 * the compiler chooses its own.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 16384 /* elements a thread takes at a time: a multiple of every vector length */
#define STRIP 1024  /* elements whose weights wait in the first cache before they are stored past it */
#define LANE 8

struct scalars {
  float scale, decay, lerp, beta2, square, step_size, bias2_sqrt, eps;
};

static inline float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t to_bf16(float x) { /* to nearest, ties to even; any NaN becomes 0x7fc0 */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline __attribute__((always_inline)) void span(
    float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq, const void *restrict grad,
    void *restrict weight, int64_t begin, int64_t end, const struct scalars s, const int grad_bf16,
    const int weight_bf16, const int tail) { /* weight[0] belongs to element begin */
  const int small = s.lerp < 0.5f; /* lerp counts from the nearer end */
  const float from_end = s.lerp - 1.0f;
  for (int64_t i = begin; i < end; i++) {
    const float g = (grad_bf16 ? from_bf16(((const uint16_t *)grad)[i]) : ((const float *)grad)[i]) * s.scale;
    const float gap = g - exp_avg[i];
    const float m = small ? fmaf(s.lerp, gap, exp_avg[i]) : fmaf(from_end, gap, g);
    const float weighted = s.square * g;
    const float v = tail ? fmaf(exp_avg_sq[i], s.beta2, weighted * g) : fmaf(weighted, g, exp_avg_sq[i] * s.beta2);
    const float denominator = sqrtf(v) / s.bias2_sqrt + s.eps;
    const float p = master[i] * s.decay - s.step_size * m / denominator;
    master[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (weight_bf16)
      ((uint16_t *)weight)[i - begin] = to_bf16(p);
    else
      ((float *)weight)[i - begin] = p;
  }
}

static inline void store(char *restrict to, const char *restrict from, int64_t bytes, int past_caches) {
#ifdef __SSE2__
  if (past_caches && ((uintptr_t)to & 15) == 0 && (bytes & 15) == 0) {
    for (int64_t i = 0; i < bytes; i += 16)
      _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
    return;
  }
#endif
  memcpy(to, from, (size_t)bytes);
}

static inline void fence(void) {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

/* Blocks are handed out as threads ask for them: one thread that loses its core does not hold up the rest. */
#define ENTRY(NAME, GRAD_BF16, WEIGHT_BF16)                                                                   \
  void NAME(float *master, float *exp_avg, float *exp_avg_sq, const void *grad, void *weight, int64_t n,       \
            const struct scalars *given, int threads, int past_caches) {                                      \
    const struct scalars s = *given;                                                                          \
    const int64_t whole = n - n % LANE;                                                                       \
    const int64_t width = WEIGHT_BF16 ? 2 : 4;                                                                \
    char *const weights = weight;                                                                             \
    _Pragma("omp parallel for schedule(dynamic) num_threads(threads) if (whole > BLOCK)")                     \
    for (int64_t block = 0; block < whole; block += BLOCK) {                                                  \
      _Alignas(64) char strip[STRIP * 4];                                                                     \
      const int64_t last = block + BLOCK < whole ? block + BLOCK : whole;                                     \
      for (int64_t begin = block; begin < last; begin += STRIP) {                                             \
        const int64_t end = begin + STRIP < last ? begin + STRIP : last;                                      \
        span(master, exp_avg, exp_avg_sq, grad, strip, begin, end, s, GRAD_BF16, WEIGHT_BF16, 0);              \
        store(weights + begin * width, strip, (end - begin) * width, past_caches);                            \
      }                                                                                                       \
      fence();                                                                                                \
    }                                                                                                         \
    span(master, exp_avg, exp_avg_sq, grad, weights + whole * width, whole, n, s, GRAD_BF16, WEIGHT_BF16, 1);  \
  }

ENTRY(adamw_bf16_bf16, 1, 1)
ENTRY(adamw_bf16_fp32, 1, 0)
ENTRY(adamw_fp32_bf16, 0, 1)
ENTRY(adamw_fp32_fp32, 0, 0)
