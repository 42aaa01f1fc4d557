// The kernels of one instruction set: KERNELS names it, and the compiler's options choose its instructions.
#include "kernels.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace draftheads {
namespace {

// Vectors as wide as the machine's registers, and how many rows and vectors of outputs a tile has: as many as there are
// registers for.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
template <int kind> constexpr int kTileRows = kind == kInt4 ? 8 : 12;
template <int kind, int rows> constexpr int kTileVecs = 2;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
template <int kind> constexpr int kTileRows = kind == kInt8 || kind == kInt4 ? 4 : kind == kBFloat16 ? 5 : 3;
template <int kind, int rows> constexpr int kTileVecs = (kind == kInt8 || kind == kInt4 || kind == kBFloat16) && rows > 2 ? 2 : 4;
#else
constexpr int kLanes = 4;
template <int kind> constexpr int kTileRows = 2;
template <int kind, int rows> constexpr int kTileVecs = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UIntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

constexpr int kHeader = 64;  // bytes before a row of int8: its scale
constexpr int kRowInputs = 8 + kInputs;  // bytes of kInputs of a row for int4: their scale, their sum, they
// What a tile fetches before it is needed, so that memory is read at all times: of its own block, or from elsewhere into the
// second-level cache. Narrow vectors fetch a share of the next block in any case: their tiles are many.
struct Ahead {
    bool is_near;      // whether its own block is fetched from a short distance, which is not in the cache yet
    const char *next;  // what else is fetched
    bool are_few;      // whether there are one or two rows: their tiles are few, and read memory in order
    int step;          // bytes of `next` for each line that the tile reads
};
constexpr int kNear = 2048;  // bytes
constexpr bool kHasTrials = kLanes == 16;  // wide vectors try whether to fetch from near or from afar

// A trial of both ways in a thread, in short runs that take turns, and which of them won. After many blocks there is another
// one, as weights may have moved between caches and memory.
struct Trial {
    static constexpr uint32_t kRun = 16, kRuns = 82, kBlocks = kRun * kRuns, kEvery = 1 << 16;
    uint32_t blocks, won;
    bool is_far;
    double ticks[2], bytes[2];  // of the last run from near, and from afar

    void add(uint32_t at, bool far, uint64_t took, int64_t size) {
        const bool is_first = at % kRun == 0;  // which the run before has fetched, or has not
        ticks[far] = is_first ? 0.0 : ticks[far] + double(took);
        bytes[far] = is_first ? 0.0 : bytes[far] + double(size);
        if (at % (2 * kRun) == 2 * kRun - 1) won += ticks[1] * bytes[0] < ticks[0] * bytes[1];
        if (at + 1 < kBlocks) return;
        is_far = won > kRuns / 4;
        won = 0;
    }
};

inline uint64_t ticks_now() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return 0;
#endif
}

#if defined(__AVX512VNNI__)
constexpr bool kTakesUnsigned = true;  // rows of int8, whose numbers are then 1 to 255
#else
constexpr bool kTakesUnsigned = false;
#endif
// Products of int4 are added in 16 bits: for 16 of a group, a sum is at most 16 * 15 * 127 = 30,480.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool kAddsPairs = true;
#else
constexpr bool kAddsPairs = false;
#endif

inline Vec load(const float *x) {
    Vec v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
inline void store(float *x, Vec v) { std::memcpy(x, &v, sizeof v); }
inline Vec all(float x) { return x - Vec{}; }

inline Vec of_bf16(const uint16_t *x) {
    HalfVec half;
    std::memcpy(&half, x, sizeof half);
    UIntVec wide = __builtin_convertvector(half, UIntVec) << 16;
    return (Vec)(wide);
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;  // not a number
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float of_half(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | (fraction << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline Vec of_fp16(const uint16_t *x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x)));
#else
    Vec v;
    for (int i = 0; i < kLanes; i++) v[i] = of_half(x[i]);
    return v;
#endif
}

inline uint16_t to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    if (bits < 0x38800000) {                                 // a small number: added to 0.5, it is rounded
        float shifted;
        std::memcpy(&shifted, &bits, 4);
        shifted += 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &shifted, 4);
        return uint16_t(sign | (rounded - 0x3f000000));
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);  // the exponent's new bias, and rounding to even
    return uint16_t(sign | (bits >> 13));
}

// The sum of the lanes, always in the same order.
inline float total(Vec v) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
    const __m256 half = (__m256)v;
#endif
#if defined(__AVX2__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The totals of four vectors of each row, all in the same order: halves, quarters, and then neighbours.
template <int rows>
[[gnu::always_inline]] inline void totals_of_fours(const Vec (*v)[4], float scaling, float *const *totals) {
#if defined(__AVX512F__)
    __m512 fours[4];  // of a row: four lanes of each vector
    for (int r = 0; r < rows; r++) {
        __m512 halves[2];
        for (int i = 0; i < 2; i++) {
            const __m512 a = (__m512)v[r][2 * i], b = (__m512)v[r][2 * i + 1];
            halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        }
        fours[r] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
    }
    for (int r = rows; r < 4; r++) fours[r] = fours[0];
    auto neighbours = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); };
    const __m512 low = neighbours(fours[0], fours[1]), high = rows > 2 ? neighbours(fours[2], fours[3]) : low;
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 all = _mm512_mul_ps(_mm512_permutexvar_ps(by_row, neighbours(low, high)), _mm512_set1_ps(scaling));
    _mm_storeu_ps(totals[0], _mm512_castps512_ps128(all));
    if constexpr (rows > 1) _mm_storeu_ps(totals[1], _mm512_extractf32x4_ps(all, 1));
    if constexpr (rows > 2) _mm_storeu_ps(totals[2], _mm512_extractf32x4_ps(all, 2));
    if constexpr (rows > 3) _mm_storeu_ps(totals[3], _mm512_extractf32x4_ps(all, 3));
#else
    for (int r = 0; r < rows; r++) {
#if defined(__AVX2__)
        __m128 four[4];
        for (int i = 0; i < 4; i++)
            four[i] = _mm_add_ps(_mm256_castps256_ps128((__m256)v[r][i]), _mm256_extractf128_ps((__m256)v[r][i], 1));
        const __m128 pairs = _mm_hadd_ps(four[0], four[1]), others = _mm_hadd_ps(four[2], four[3]);
        _mm_storeu_ps(totals[r], _mm_mul_ps(_mm_hadd_ps(pairs, others), _mm_set1_ps(scaling)));
#else
        for (int i = 0; i < 4; i++) totals[r][i] = total(v[r][i]) * scaling;
#endif
    }
#endif
}

// sums += a * b
inline void add_product(Vec &sums, Vec a, Vec b) {
#if defined(__AVX512F__)
    sums = (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__AVX2__)
    sums = (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#else
    sums += a * b;
#endif
}

inline bool any(IntVec is_true) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)is_true);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)is_true);
#else
    return is_true[0] | is_true[1] | is_true[2] | is_true[3];
#endif
}

inline float largest(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float most = v[0];
    for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
    return most;
}

inline Vec max(Vec a, Vec b) { return a < b ? b : a; }

// e^x, within two units of the last place; 0 below -87.
inline Vec exponential(Vec x) {
    const IntVec is_tiny = x < all(-87.3f);
    x = is_tiny ? all(-87.3f) : x;
    const IntVec is_huge = x > all(88.3f);
    x = is_huge ? all(88.3f) : x;
    Vec scaled = x * all(1.44269504088896341f) + all(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
    IntVec whole = (IntVec)(scaled) - 0x4b400000;
    Vec n = scaled - all(12582912.0f);
    Vec r = x - n * all(0.693359375f) + n * all(2.12194440e-4f);
    Vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1.0f);
    IntVec power = (whole + 127) << 23;
    Vec result = p * (Vec)(power);
    return is_tiny ? Vec{} : result;
}

// --- products ---

// Inputs in bf16 are multiplied as they are where there are instructions for it, and are widened elsewhere.
inline bool reads_bf16(const Weight &weight) {
#if defined(__AVX512BF16__)
    return weight.kind == kBFloat16 && weight.inputs == kBFloat16;
#else
    (void)weight;
    return false;
#endif
}

int64_t input_bytes(const Weight &weight) {
    const int64_t in = weight.in;
    if (weight.kind == kInt8) return kHeader + (in + 63) / 64 * 64;
    if (weight.kind == kInt4) return (in + kInputs - 1) / kInputs * kRowInputs;
    return reads_bf16(weight) ? 2 * ((in + 1) / 2 * 2) : 4 * ((in + 1) / 2 * 2);
}

void store_as(int kind, const float *x, int64_t size, void *out) {
    if (kind == kFloat32) {
        std::memcpy(out, x, 4 * size);
        return;
    }
    auto *half = static_cast<uint16_t *>(out);
    int64_t i = 0;
    if (kind == kBFloat16) {
#if defined(__AVX512BF16__)
        for (; i + 16 <= size; i += 16) {
            __m256bh v = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
            std::memcpy(half + i, &v, 32);
        }
#endif
        for (; i < size; i++) half[i] = to_bf16(x[i]);
    } else {
#if defined(__F16C__)
        for (; i + 8 <= size; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i *>(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
        for (; i < size; i++) half[i] = to_half(x[i]);
    }
}

inline Vec load_as(int kind, const char *x) {
    if (kind == kBFloat16) return of_bf16(reinterpret_cast<const uint16_t *>(x));
    if (kind == kFloat16) return of_fp16(reinterpret_cast<const uint16_t *>(x));
    return load(reinterpret_cast<const float *>(x));
}

// The first numbers only, and zeros behind them.
inline Vec load_some(int kind, const char *x, int count) {
    char whole[4 * kLanes] = {};
    std::memcpy(whole, x, count * (kind == kFloat32 ? 4 : 2));
    return load_as(kind, whole);
}

void load_from(int kind, const void *x, int64_t size, float *out) {
    const int bytes = kind == kFloat32 ? 4 : 2;
    auto *from = static_cast<const char *>(x);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load_as(kind, from + i * bytes));
    if (i == size) return;
    float rest[kLanes];
    store(rest, load_some(kind, from + i * bytes, int(size - i)));
    std::memcpy(out + i, rest, 4 * (size - i));
}

constexpr float kTiny = 1e-36f;  // so small numbers become 0: 127 divided by one may be infinite

// Rounds numbers to whole ones from -127 to 127, and adds `more`. Returns their scale. The last ones may be followed by
// some that stand for 0.
float quantise(const float *row, const float *smooth, int in, int more, char *rounded_row) {
    Vec most = {}, strange = {};  // strange: not a number if one of them is none
    auto numbers = [&](int i) __attribute__((always_inline)) {
        const int count = in - i < kLanes ? in - i : kLanes;
        const Vec x = count == kLanes ? load(row + i) : load_some(kFloat32, reinterpret_cast<const char *>(row + i), count);
        if (!smooth) return x;
        return x * (count == kLanes ? load(smooth + i)
                                    : load_some(kFloat32, reinterpret_cast<const char *>(smooth + i), count));
    };
    for (int i = 0; i < in; i += kLanes) {
        const Vec x = numbers(i);
        most = max(most, max(x, -x));
        strange += x * 0.0f;
    }
    const float largest_of_row = largest(most), factor = largest_of_row > kTiny ? 127.0f / largest_of_row : 0.0f;
    const float scale = largest_of_row / 127.0f + total(strange);
    for (int i = 0; i < in; i += kLanes) {
        const Vec rounded = numbers(i) * factor + all(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
        const IntVec whole = (IntVec)(rounded) - (0x4b400000 - more);
        const ByteVec bytes = __builtin_convertvector(whole, ByteVec);
        std::memcpy(rounded_row + i, &bytes, kLanes);
    }
    return scale;
}

// A row for int4: kInputs at a time have a scale and, as a number, their sum.
void quantise_for_int4(const float *row, int in, char *prepared) {
    for (int first = 0; first < in; first += kInputs, prepared += kRowInputs) {
        signed char rounded[kInputs] = {};
        const int count = in - first < kInputs ? in - first : kInputs;
        const float scale = quantise(row + first, nullptr, count, 0, reinterpret_cast<char *>(rounded));
        int whole = 0;
        for (int i = 0; i < kInputs; i++) whole += rounded[i];
        const float both[2] = {scale, scale * float(whole)};
        std::memcpy(prepared, both, 8);
        std::memcpy(prepared + 8, rounded, kInputs);
    }
}

void prepare(const Weight &weight, const float *row, void *prepared) {
    const int in = weight.in;
    if (weight.kind == kInt4) return quantise_for_int4(row, in, static_cast<char *>(prepared));
    if (weight.kind == kInt8) {  // with one scale
        auto *bytes = static_cast<char *>(prepared);
        const float scale = quantise(row, weight.smooth, in, kTakesUnsigned ? 128 : 0, bytes + kHeader);
        std::memcpy(bytes, &scale, 4);
        return;
    }
    if (reads_bf16(weight)) {
        auto *numbers = static_cast<uint16_t *>(prepared);
        store_as(kBFloat16, row, in, numbers);
        if (in % 2) numbers[in] = 0;
        return;
    }
    auto *numbers = static_cast<float *>(prepared);
    std::memcpy(numbers, row, 4 * int64_t(in));
    if (weight.inputs == kBFloat16)
        for (int i = 0; i < in; i++) {
            const uint32_t bits = uint32_t(to_bf16(numbers[i])) << 16;
            std::memcpy(numbers + i, &bits, 4);
        }
    if (in % 2) numbers[in] = 0.0f;
}

constexpr int kPairs = kKinds;  // bf16 weights with bf16 inputs, two products in an instruction

template <int bytes, int rows, bool is_light = false>
inline void fetch(const char *weight, Ahead &ahead) {
    constexpr bool is_tried = kHasTrials && rows > 2, is_fixed = kHasTrials && !is_tried;
    for (int at = 0; at < bytes; at += 64) {
        const bool is_near = !(kHasTrials && is_light) && ahead.is_near;
        if (is_fixed && is_light) __builtin_prefetch(weight + 2 * kNear + at, 0, 2);
        if (is_near) __builtin_prefetch(weight + (!kHasTrials && ahead.are_few ? kNear / 2 : kNear) + at);
        if (is_tried ? !is_near : !kHasTrials && !ahead.are_few) __builtin_prefetch(ahead.next, 0, 2);
        ahead.next += ahead.step;
    }
}

// Four numbers of a row times four of each of 16 outputs, added to their sums.
inline void add_four(IntVec &sums, const char *four, IntVec w) {
#if defined(__AVX512VNNI__) || defined(__AVX512BW__) || defined(__AVX2__)
    int32_t given;
    std::memcpy(&given, four, 4);
#endif
#if defined(__AVX512VNNI__)
    sums = (IntVec)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(given), (__m512i)w);
#elif defined(__AVX512BW__)  // the sign of the weight goes to the row: |w| * ±x, and no sum of two is too large
    const __m512i zero = _mm512_setzero_si512(), all = _mm512_set1_epi32(given);
    const __m512i x = _mm512_mask_sub_epi8(all, _mm512_movepi8_mask((__m512i)w), zero, all);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), x);
    sums += (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi32(given), whole = (__m256i)w;
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(whole), _mm256_sign_epi8(all, whole));
    sums += (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int j = 0; j < 4; j++) sums += ((w << (24 - 8 * j)) >> 24) * int32_t(static_cast<signed char>(four[j]));
#endif
}

#if defined(__AMX_TILE__)
// The sums of a row of 32 outputs as numbers; the row was taken as its numbers + 128.
inline void scale_sums(const int32_t *sums, const char *row, const char *scales, float *y) {
    float of_row;
    std::memcpy(&of_row, row, 4);
    for (int at = 0; at < kBlock; at += kLanes) {
        IntVec sum, whole;
        std::memcpy(&sum, sums + at, sizeof sum);
        std::memcpy(&whole, scales + 4 * (kBlock + at), sizeof whole);
        const Vec of_weight = load(reinterpret_cast<const float *>(scales + 4 * at));
        store(y + at, __builtin_convertvector(sum - (whole << 7), Vec) * (of_weight * of_row));
    }
}
#endif

template <int rows, int vecs>
inline void tile_of_int8(const char *weight, const char *const *x, int in, const char *scales, Ahead ahead, float *y) {
    IntVec sums[rows][vecs] = {};
    const int groups = (in + 3) / 4;
    for (int group = 0; group < groups; group++, weight += 4 * kBlock) {
        IntVec w[vecs];
        fetch<4 * kLanes * vecs, rows, rows <= 8>(weight, ahead);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) std::memcpy(&w[v], weight + 4 * kLanes * v, 4 * kLanes);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) add_four(sums[r][v], x[r] + kHeader + 4 * int64_t(group), w[v]);
    }
    for (int v = 0; v < vecs; v++) {
        const Vec of_weight = load(reinterpret_cast<const float *>(scales + 4 * kLanes * v));
        for (int r = 0; r < rows; r++) {
            float of_row;
            std::memcpy(&of_row, x[r], 4);
#if defined(__AVX512VNNI__)
            IntVec whole;  // the row was taken as its numbers + 128
            std::memcpy(&whole, scales + 4 * kBlock + 4 * kLanes * v, 4 * kLanes);
            sums[r][v] -= whole << 7;
#endif
            store(y + r * kBlock + v * kLanes, __builtin_convertvector(sums[r][v], Vec) * (of_weight * of_row));
        }
    }
}

// Eight numbers of a row times eight of each output, of which `w` has four in its low and four in its high halves.
inline void add_eight(IntVec &sums, const char *eight, IntVec low, IntVec high) {
#if defined(__AVX2__)
    int32_t first, second;
    std::memcpy(&first, eight, 4);
    std::memcpy(&second, eight + 4, 4);
#endif
#if defined(__AVX512VNNI__)
    sums = (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)low, _mm512_set1_epi32(first));
    sums = (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)high, _mm512_set1_epi32(second));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)low, _mm512_set1_epi32(first));
    const __m512i others = _mm512_maddubs_epi16((__m512i)high, _mm512_set1_epi32(second));
    sums = (IntVec)_mm512_add_epi16((__m512i)sums, _mm512_add_epi16(pairs, others));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)low, _mm256_set1_epi32(first));
    const __m256i others = _mm256_maddubs_epi16((__m256i)high, _mm256_set1_epi32(second));
    sums = (IntVec)_mm256_add_epi16((__m256i)sums, _mm256_add_epi16(pairs, others));
#else
    for (int j = 0; j < 4; j++) {
        sums += (low >> (8 * j) & 255) * int32_t(static_cast<signed char>(eight[j]));
        sums += (high >> (8 * j) & 255) * int32_t(static_cast<signed char>(eight[4 + j]));
    }
#endif
}

// The sums of kInputs, as numbers.
inline Vec numbers_of(IntVec sums) {
#if defined(__AVX512F__)
    if (kAddsPairs) sums = (IntVec)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    sums = (IntVec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
    return __builtin_convertvector(sums, Vec);
}

// sums += a * b, rounded once also where there is no instruction for it, so that all sets give the same bits.
inline void add_product_once(Vec &sums, Vec a, Vec b) {
#if defined(__AVX2__)
    add_product(sums, a, b);
#else
    for (int lane = 0; lane < kLanes; lane++) sums[lane] = std::fma(a[lane], b[lane], sums[lane]);
#endif
}

// Of the outputs from `first` on. Each group of inputs is added as a whole number, and these are added in their order.
template <int rows, int vecs>
inline void tile_of_int4(const char *weight, const char *const *x, int in, int first, Ahead ahead, float *y) {
    Vec sums[rows][vecs] = {};
    const int groups = (in + kInputs - 1) / kInputs;
    for (int group = 0; group < groups; group++, weight += kInputsBytes) {
        const int64_t at = int64_t(group) * kRowInputs;
        IntVec of_group[rows][vecs] = {};
        for (int k = 0; k < kInputs; k += 8) {
            const char *eight = weight + k / 2 * kBlock + 4 * first;
            fetch<4 * kLanes * vecs, rows>(eight, ahead);
            IntVec low[vecs], high[vecs];
            for (int v = 0; v < vecs; v++) {
                UIntVec both;
                std::memcpy(&both, eight + 4 * kLanes * v, 4 * kLanes);
                low[v] = (IntVec)(both & 0x0f0f0f0f);
                high[v] = (IntVec)(both >> 4 & 0x0f0f0f0f);
            }
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vecs; v++) add_eight(of_group[r][v], x[r] + at + 8 + k, low[v], high[v]);
        }
        fetch<4 * kLanes * vecs, rows>(weight + scale_at(first), ahead);
        for (int v = 0; v < vecs; v++) {
            const char *scales = weight + scale_at(first + kLanes * v);
            const Vec of_weight = load_as(kBFloat16, scales), least = load_as(kBFloat16, scales + 32);
            for (int r = 0; r < rows; r++) {
                float both[2];
                std::memcpy(both, x[r] + at, 8);
                add_product_once(sums[r][v], numbers_of(of_group[r][v]), of_weight * both[0]);
                add_product_once(sums[r][v], least, all(both[1]));
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store(y + r * kBlock + v * kLanes, sums[r][v]);
}

template <int kind, int rows, int vecs>
inline void tile(const char *weight, const char *const *x, int in, Ahead ahead, float *y) {
    Vec sums[rows][vecs] = {};
#if defined(__AVX512BF16__)
    if constexpr (kind == kPairs) {
        for (int pair = 0; pair < (in + 1) / 2; pair++, weight += 4 * kBlock) {
            fetch<64 * vecs, rows>(weight, ahead);
            __m512bh w[vecs];
            for (int v = 0; v < vecs; v++) std::memcpy(&w[v], weight + 64 * v, 64);
            for (int r = 0; r < rows; r++) {
                int32_t two;
                std::memcpy(&two, x[r] + 4 * pair, 4);
                __m512i both = _mm512_set1_epi32(two);
                for (int v = 0; v < vecs; v++) {
                    __m512 sum = (__m512)(sums[r][v]);
                    sum = _mm512_dpbf16_ps(sum, w[v], (__m512bh)(both));
                    sums[r][v] = (Vec)(sum);
                }
            }
        }
    } else
#endif
    if constexpr (kind == kBFloat16) {
        for (int pair = 0; pair < (in + 1) / 2; pair++, weight += 4 * kBlock) {
            fetch<4 * kLanes * vecs, rows>(weight, ahead);
            Vec low[vecs], high[vecs];
            for (int v = 0; v < vecs; v++) {
                UIntVec both;
                std::memcpy(&both, weight + 4 * kLanes * v, 4 * kLanes);
                UIntVec first = both << 16, second = both & 0xffff0000u;
                low[v] = (Vec)(first);
                high[v] = (Vec)(second);
            }
            for (int r = 0; r < rows; r++) {
                float two[2];
                std::memcpy(two, x[r] + 8 * pair, 8);
                for (int v = 0; v < vecs; v++) add_product(sums[r][v], low[v], all(two[0]));
                for (int v = 0; v < vecs; v++) add_product(sums[r][v], high[v], all(two[1]));
            }
        }
    } else {
        constexpr int bytes = kind == kFloat32 ? 4 : 2;
        for (int k = 0; k < in; k++, weight += bytes * kBlock) {
            fetch<bytes * kLanes * vecs, rows>(weight, ahead);
            Vec w[vecs];
            for (int v = 0; v < vecs; v++) w[v] = load_as(kind, weight + bytes * kLanes * v);
            for (int r = 0; r < rows; r++) {
                float one;
                std::memcpy(&one, x[r] + 4 * int64_t(k), 4);
                for (int v = 0; v < vecs; v++) add_product(sums[r][v], w[v], all(one));
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store(y + r * kBlock + v * kLanes, sums[r][v]);
}

template <int kind, int rows>
void tiles(const char *weight, const char *const *x, int in, Ahead ahead, float *y) {
    constexpr int vecs = kTileVecs<kind, rows>;
    constexpr int bytes = (kind == kFloat16 ? 2 : 4) * kLanes;  // of a vector: numbers, pairs or groups of four
    constexpr int group = kind == kInt4 ? kInputs : group_of(kind == kPairs ? kBFloat16 : kind);
    constexpr int read = bytes * vecs * (kind == kInt4 ? kInputs / 8 + 1 : 1);  // for each of them
    const int64_t share = int64_t(ahead.step) * ((in + group - 1) / group) * read / 64;
    for (int v = 0; v < kBlock / kLanes; v += vecs, ahead.next += share) {
        if constexpr (kind == kInt4)
            tile_of_int4<rows, vecs>(weight, x, in, v * kLanes, ahead, y + v * kLanes);
        else if constexpr (kind == kInt8)
            tile_of_int8<rows, vecs>(weight + bytes * v, x, in, weight + block_bytes(kInt8, in) - 8 * kBlock + 4 * kLanes * v,
                                     ahead, y + v * kLanes);
        else
            tile<kind, rows, vecs>(weight + bytes * v, x, in, ahead, y + v * kLanes);
    }
}

typedef void (*Tiles)(const char *, const char *const *, int, Ahead, float *);

template <int kind, int... rows>
constexpr auto tiles_of(std::integer_sequence<int, rows...>) {
    return std::array<Tiles, sizeof...(rows)>{tiles<kind, rows + 1>...};
}

template <int kind>
void rows_of(const char *packed, int64_t bytes, int in, const char *x, int64_t stride, int rows, float *y) {
    constexpr int most = kTileRows<kind>;
    constexpr auto of_rows = tiles_of<kind>(std::make_integer_sequence<int, most>());
    const int pieces = (rows + most - 1) / most;
    static thread_local Trial trials[2];  // of one piece, and of several
    Trial &trial = trials[pieces > 1];
    // with more pieces, products take longer than memory in any case
    const bool has_trials = kHasTrials && rows > 2 && pieces <= 4;
    const uint32_t at = has_trials ? trial.blocks++ % Trial::kEvery : Trial::kBlocks;
    const bool is_trial = at < Trial::kBlocks, is_far = is_trial ? at / Trial::kRun % 2 : has_trials && trial.is_far;
    const uint64_t start = is_trial ? ticks_now() : 0;
    for (int piece = 0, first = 0; piece < pieces; piece++) {
        const int end = int(int64_t(rows) * (piece + 1) / pieces), count = end - first;
        const char *of[most];
        for (int r = 0; r < count; r++) of[r] = x + (first + r) * stride;
        Ahead ahead{!piece, packed + bytes + bytes * piece / pieces, rows <= 2, 64 / pieces};
        if (kHasTrials && is_far) ahead.is_near = false;
        if (kHasTrials && (pieces == 1 || !is_far)) ahead.next = packed + (is_far ? 4 : 2) * kNear, ahead.step = 64;
        of_rows[count - 1](packed, of, in, ahead, y + first * kBlock);
        first = end;
    }
    if (is_trial) trial.add(at, is_far, ticks_now() - start, bytes);
}

#if defined(__AMX_TILE__)
// The machine's registers of two dimensions, each of up to 16 rows of 64 bytes. 0 to 3 have sums of two halves of the
// rows by two halves of the outputs, 4 and 5 rows, 6 and 7 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
constexpr int kTileSide = 16, kTileBytes = 2 * 64 * kTileSide;  // of a block's weights in one step
constexpr int kNearTiles = 2 * kTileBytes;

// The sums of up to 32 rows stay in the registers.
template <bool is_int8, bool is_tall>
inline void multiply_tiles(const char *weight, int steps, const char *x, int64_t stride, bool is_cold) {
    for (int step = 0; step < steps; step++, weight += kTileBytes, x += 64) {
        if (is_cold)
            for (int at = 0; at < kTileBytes; at += 64) __builtin_prefetch(weight + kNearTiles + at);
        _tile_loadd(4, x, stride);
        _tile_loadd(6, weight, 128);
        _tile_loadd(7, weight + 64, 128);
        if constexpr (is_tall) _tile_loadd(5, x + kTileSide * stride, stride);
        if constexpr (is_int8) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if constexpr (is_tall) {
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (is_tall) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
}

template <bool is_int8>
void rows_by_tiles(const char *packed, int in, const char *x, int64_t stride, int rows, float *y) {
    constexpr int most = 2 * kTileSide;
    const int steps = in / (is_int8 ? 64 : 32);
    const char *scales = packed + int64_t(in) * kBlock;  // of int8
    for (int first = 0; first < rows; first += most) {
        const int count = rows - first < most ? rows - first : most, high = count > kTileSide ? count - kTileSide : 0;
        const int low = count - high;
        TileShapes shapes;
        for (int tile = 0; tile < 8; tile++) {
            const bool is_second = tile == 2 || tile == 3 || tile == 5;
            shapes.bytes[tile] = 64;
            shapes.rows[tile] = uint8_t(tile >= 6 ? kTileSide : is_second ? (high ? high : 1) : low);
        }
        _tile_loadconfig(&shapes);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const char *of = x + first * stride + (is_int8 ? kHeader : 0);
        (high ? multiply_tiles<is_int8, true> : multiply_tiles<is_int8, false>)(packed, steps, of, stride, !first);
        int32_t whole[most * kBlock];
        void *to = is_int8 ? static_cast<void *>(whole) : y + int64_t(first) * kBlock;
        _tile_stored(0, to, 4 * kBlock);
        _tile_stored(1, static_cast<char *>(to) + 64, 4 * kBlock);
        if (high) {
            char *second = static_cast<char *>(to) + 4 * kBlock * kTileSide;
            _tile_stored(2, second, 4 * kBlock);
            _tile_stored(3, second + 64, 4 * kBlock);
        }
        if (is_int8)
            for (int r = 0; r < count; r++) scale_sums(whole + r * kBlock, x + (first + r) * stride, scales, y + (first + r) * kBlock);
    }
    _tile_release();
}
#endif

void block(const Weight &weight, int number, const void *prepared, int rows, float *y) {
    const int64_t bytes = block_bytes(weight.kind, weight.in);
#if defined(__AMX_TILE__)
    // whatever the rows: sums of bf16 are added in another order than with vectors
    if (auto *by_tiles = weight.kind == kInt8 && weight.in % 64 == 0       ? rows_by_tiles<true>
                         : reads_bf16(weight) && weight.in % 32 == 0 ? rows_by_tiles<false>
                                                                           : nullptr)
        return by_tiles(static_cast<const char *>(weight.packed) + number * bytes, weight.in,
                        static_cast<const char *>(prepared), input_bytes(weight), rows, y);
#endif
    auto *of_kind = weight.kind == kFloat32   ? rows_of<kFloat32>
                    : weight.kind == kInt8    ? rows_of<kInt8>
                    : weight.kind == kInt4    ? rows_of<kInt4>
                    : weight.kind == kFloat16 ? rows_of<kFloat16>
#if defined(__AVX512BF16__)
                    : reads_bf16(weight) ? rows_of<kPairs>
#endif
                                         : rows_of<kBFloat16>;
    of_kind(static_cast<const char *>(weight.packed) + number * bytes, bytes, weight.in,
            static_cast<const char *>(prepared), input_bytes(weight), rows, y);
}

// --- the rest of a layer ---

void norm(const Norm &norm, const float *x, int size, float *out) {
    float mean = 0.0f;
    int i = 0;
    if (norm.is_centred) {
        Vec sums = {};
        for (; i + kLanes <= size; i += kLanes) sums += load(x + i);
        mean = total(sums);
        for (; i < size; i++) mean += x[i];
        mean /= float(size);
    }
    Vec squares = {};
    for (i = 0; i + kLanes <= size; i += kLanes) {
        const Vec v = load(x + i) - mean;
        squares += v * v;
    }
    float sum = total(squares);
    for (; i < size; i++) sum += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(sum / float(size) + norm.epsilon);
    for (i = 0; i + kLanes <= size; i += kLanes) {
        const Vec v = (load(x + i) - mean) * factor * load(norm.scale + i);
        store(out + i, norm.shift ? v + load(norm.shift + i) : v);
    }
    for (; i < size; i++) out[i] = (x[i] - mean) * factor * norm.scale[i] + (norm.shift ? norm.shift[i] : 0.0f);
}

template <int kind>
void dots_of(const char *rows, const float *x, int count, int size, float *out) {
    constexpr int bytes = bytes_of(kind);
    for (int r = 0; r < count; r++, rows += int64_t(size) * bytes) {
        Vec sums = {};
        int i = 0;
        for (; i + kLanes <= size; i += kLanes) sums += load_as(kind, rows + i * bytes) * load(x + i);
        float sum = total(sums), number;
        for (; i < size; i++) {
            load_from(kind, rows + i * bytes, 1, &number);
            sum += number * x[i];
        }
        out[r] = sum;
    }
}

void dots(int kind, const void *rows, const float *x, int count, int size, float *out) {
    auto *of = kind == kFloat32 ? dots_of<kFloat32> : dots_of<kBFloat16>;
    of(static_cast<const char *>(rows), x, count, size, out);
}

void turn(float *head, const float *cos, const float *sin, int size, bool are_neighbours) {
    const int half = size / 2, step = are_neighbours ? 2 : 1, other = are_neighbours ? 1 : half;
    for (int pair = 0; pair < half; pair++) {
        const int i = pair * step, j = i + other;
        const float first = head[i], second = head[j];
        head[i] = first * cos[i] - second * sin[i];
        head[j] = second * cos[j] + first * sin[j];
    }
}

// erf(x), to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline Vec error_function(Vec x) {
    const Vec size = max(x, -x), t = 1.0f / (1.0f + 0.3275911f * size);
    const Vec sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const Vec of_size = 1.0f - sum * exponential(-size * size);
    return x < Vec{} ? -of_size : of_size;
}

// What SiLU, or what stands in its place, makes of x.
inline Vec activated(int act, Vec x) {
    if (act == kSilu) return x / (all(1.0f) + exponential(-x));
    if (act == kReluSquared) return max(x, Vec{}) * max(x, Vec{});
    if (act == kSigmoid) return 1.0f / (all(1.0f) + exponential(-x));
    if (act == kGelu) return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
    const Vec inner = all(1.5957691216057308f) * (x + all(0.044715f) * x * x * x);  // GELU by tanh: x * sigmoid(2 ...)
    return x / (all(1.0f) + exponential(-inner));
}

inline Vec joined(const Gate &how, Vec gate, Vec up) {
    if (how.act != kClamped) return activated(how.act, gate) * up;
    const Vec limit = all(how.limit);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + exponential(-how.alpha * gate)) * (up + 1.0f);
}

void gate(const Gate &how, const float *gate, const float *up, int size, float *out) {
    const Vec one = all(1.0f);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, joined(how, load(gate + i), up ? load(up + i) : one));
    if (i == size) return;
    float g[kLanes] = {}, u[kLanes] = {}, o[kLanes];
    std::memcpy(g, gate + i, 4 * (size - i));
    if (up) std::memcpy(u, up + i, 4 * (size - i));
    store(o, joined(how, load(g), up ? load(u) : one));
    std::memcpy(out + i, o, 4 * (size - i));
}

// base + SiLU(x)
void add_silu(const float *base, const float *x, int size, float *out) {
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(base + i) + activated(0, load(x + i)));
    if (i == size) return;
    float b[kLanes] = {}, n[kLanes] = {}, o[kLanes];
    std::memcpy(b, base + i, 4 * (size - i));
    std::memcpy(n, x + i, 4 * (size - i));
    store(o, load(b) + activated(0, load(n)));
    std::memcpy(out + i, o, 4 * (size - i));
}

// --- attention ---

constexpr int kAttendRows = kLanes == 16 ? 5 : 2, kAttendKeys = 4, kAttendVecs = 4;

// Keys or values of one text and group.
struct Entries {
    const char *data;
    int64_t stride;  // bytes
    int size;        // numbers of an entry
};

// Which entries: a range, or those of a list.
struct Slots {
    const int32_t *list;
    int first, count;
    int64_t operator[](int i) const { return list ? list[i] : first + i; }
};

template <int kind>
inline Vec part_of(const char *entry, int size, int v) {
    constexpr int bytes = kind == kFloat32 ? 4 : 2;
    const int left = size - v * kLanes;
    const char *from = entry + v * kLanes * bytes;
    return left >= kLanes ? load_as(kind, from) : load_some(kind, from, left);
}

// The scores of `rows` queries for some keys. `whole`: the number of vectors of a head if there is no rest, or 0.
template <int kind, int rows, int whole>
inline void score(const float *const *queries, const Entries &keys, const Slots &slots, float scaling, float *const *out) {
    const int size = whole ? whole * kLanes : keys.size, vecs = (size + kLanes - 1) / kLanes;
    for (int k = 0; k < slots.count; k += kAttendKeys) {
        const int count = slots.count - k < kAttendKeys ? slots.count - k : kAttendKeys;
        const char *of[kAttendKeys];
        for (int i = 0; i < kAttendKeys; i++) of[i] = keys.data + slots[k + (i < count ? i : 0)] * keys.stride;
        Vec sums[rows][kAttendKeys] = {};
        for (int v = 0; v < vecs; v++) {
            Vec key[kAttendKeys];
            for (int i = 0; i < kAttendKeys; i++) key[i] = part_of<kind>(of[i], size, v);
            for (int r = 0; r < rows; r++) {
                const Vec query = part_of<kFloat32>(reinterpret_cast<const char *>(queries[r]), size, v);
                for (int i = 0; i < kAttendKeys; i++) add_product(sums[r][i], query, key[i]);
            }
        }
        float rest[rows][kAttendKeys], *to[rows];
        for (int r = 0; r < rows; r++) to[r] = count == kAttendKeys ? out[r] + k : rest[r];
        constexpr int most = rows < 4 ? rows : 4;
        totals_of_fours<most>(sums, scaling, to);
        if constexpr (rows > most) totals_of_fours<rows - most>(sums + most, scaling, to + most);
        for (int r = 0; r < rows && count < kAttendKeys; r++)
            for (int i = 0; i < count; i++) out[r][k + i] = rest[r][i];
    }
}

// Adds weights times values to `rows` outputs, kAttendVecs vectors of each at a time.
template <int kind, int rows, int whole>
inline void mix(const float *const *weights, const Entries &values, const Slots &slots, float *const *out) {
    const int size = whole ? whole * kLanes : values.size, vecs = (size + kLanes - 1) / kLanes;
    auto few = [&](int v, auto number) {
        constexpr int n = decltype(number)::value;
        Vec sums[rows][n];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < n; i++) sums[r][i] = load(out[r] + (v + i) * kLanes);
        for (int k = 0; k < slots.count; k++) {
            const char *of = values.data + slots[k] * values.stride;
            Vec value[n];
            for (int i = 0; i < n; i++) value[i] = part_of<kind>(of, size, v + i);
            for (int r = 0; r < rows; r++) {
                const Vec weight = all(weights[r][k]);
                for (int i = 0; i < n; i++) add_product(sums[r][i], weight, value[i]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < n; i++) store(out[r] + (v + i) * kLanes, sums[r][i]);
    };
    int v = 0;
    for (; v + kAttendVecs <= vecs; v += kAttendVecs) few(v, std::integral_constant<int, kAttendVecs>());
    if constexpr (!whole || whole % kAttendVecs)
        for (; v < vecs; v++) few(v, std::integral_constant<int, 1>());
}

// The scores become weights; returns 1 / their sum. Their number is rounded up to whole vectors.
inline float weigh(float *scores, int count, float cap, float sink) {
    const int width = (count + kLanes - 1) / kLanes * kLanes;
    if (cap > 0.0f)  // tanh(x) = 1 - 2 / (1 + e^2x)
        for (int e = 0; e < width; e += kLanes) {
            const Vec tanh = 1.0f - 2.0f / (1.0f + exponential(load(scores + e) * (2.0f / cap)));
            store(scores + e, cap * tanh);
        }
    for (int e = count; e < width; e++) scores[e] = -INFINITY;
    Vec most = all(sink), sums = {};
    for (int e = 0; e < width; e += kLanes) most = max(most, load(scores + e));
    const Vec top = all(largest(most));
    for (int e = 0; e < width; e += kLanes) {
        const Vec weight = exponential(load(scores + e) - top);
        store(scores + e, weight);
        sums += weight;
    }
    return 1.0f / (total(sums) + (sink > -INFINITY ? exponential(sink - top)[0] : 0.0f));
}

template <int kind, int whole>
void attend_to(const Query *queries, int count, const Entries &keys, const Entries &values, float scaling, float cap, float *scratch) {
    constexpr int rows = kAttendRows;
    const int size = keys.size, padded = (size + kLanes - 1) / kLanes * kLanes;
    const int pieces = (count + rows - 1) / rows;
    for (int piece = 0, first = 0, few; piece < pieces; piece++, first += few) {
        few = count * (piece + 1) / pieces - first;
        const Query *of = queries + first;
        int begin = of[0].start, end = of[0].end;  // what all see
        for (int r = 1; r < few; r++) {
            begin = of[r].start > begin ? of[r].start : begin;
            end = of[r].end < end ? of[r].end : end;
        }
        if (end < begin) end = begin;
        const float *query[rows], *weights[rows];
        float *scores[rows], *out[rows], *at[rows], mixed[rows][kMostHead];
        float *next = scratch;
        for (int r = 0; r < few; r++) {
            const int seen = of[r].end - of[r].start + of[r].listed;
            query[r] = of[r].query;
            scores[r] = next;
            next += (seen + kLanes - 1) / kLanes * kLanes;
            std::memset(mixed[r], 0, 4 * padded);
            out[r] = mixed[r];
        }
        // of one row alone: what it sees before the others do, after them, and in its list
        auto before = [&](int r) { const int stop = begin < of[r].end ? begin : of[r].end; return Slots{nullptr, of[r].start, stop > of[r].start ? stop - of[r].start : 0}; };
        auto after = [&](int r) { const int from = end > of[r].start + before(r).count ? end : of[r].start + before(r).count; return Slots{nullptr, from, of[r].end > from ? of[r].end - from : 0}; };
        const Slots common{nullptr, begin, end - begin};
        auto together = [&](auto work) {
            if (few == 1) work(std::integral_constant<int, 1>());
            else if (few == 2) work(std::integral_constant<int, 2>());
            else if constexpr (rows > 2)
                few == 3   ? work(std::integral_constant<int, 3>())
                : few == 4 ? work(std::integral_constant<int, 4>())
                           : work(std::integral_constant<int, 5>());
        };
        for (int r = 0; r < few; r++) at[r] = scores[r] + (begin - of[r].start);
        if (common.count)
            together([&](auto n) { score<kind, decltype(n)::value, whole>(query, keys, common, scaling, at); });
        for (int r = 0; r < few; r++) {
            float *all_of_row = scores[r];
            const int text = of[r].end - of[r].start;
            auto alone = [&](const Slots &slots, int where) {
                float *to = all_of_row + where;
                if (slots.count) score<kind, 1, whole>(query + r, keys, slots, scaling, &to);
            };
            alone(before(r), 0);
            alone(after(r), text - after(r).count);
            alone(Slots{of[r].list, 0, of[r].listed}, text);
        }
        float factors[rows];
        for (int r = 0; r < few; r++) {
            factors[r] = weigh(scores[r], of[r].end - of[r].start + of[r].listed, cap, of[r].sink);
            weights[r] = scores[r];
            if (const Slots slots = before(r); slots.count) mix<kind, 1, whole>(weights + r, values, slots, out + r);
        }
        for (int r = 0; r < few; r++) weights[r] = scores[r] + (begin - of[r].start);
        if (common.count)
            together([&](auto n) { mix<kind, decltype(n)::value, whole>(weights, values, common, out); });
        for (int r = 0; r < few; r++) {
            const int text = of[r].end - of[r].start;
            auto alone = [&](const Slots &slots, int where) {
                const float *from = scores[r] + where;
                if (slots.count) mix<kind, 1, whole>(&from, values, slots, out + r);
            };
            alone(after(r), text - after(r).count);
            alone(Slots{of[r].list, 0, of[r].listed}, text);
            for (int i = 0; i < size; i++) of[r].out[i] = mixed[r][i] * factors[r];
        }
    }
}

template <int kind>
void attend_of(const Query *queries, int count, const Entries &keys, const Entries &values, float scaling, float cap, float *scratch) {
    auto *of_size = keys.size == 64    ? attend_to<kind, 64 / kLanes>
                    : keys.size == 128 ? attend_to<kind, 128 / kLanes>
                    : keys.size == 256 ? attend_to<kind, 256 / kLanes>
                                       : attend_to<kind, 0>;
    of_size(queries, count, keys, values, scaling, cap, scratch);
}

void attend(int kind, const Query *queries, int count, int size, const char *keys, const char *values, int64_t stride,
            float scaling, float cap, float *scratch) {
    const int64_t bytes = stride * bytes_of(kind);
    auto *of = kind == kFloat32 ? attend_of<kFloat32> : kind == kBFloat16 ? attend_of<kBFloat16> : attend_of<kFloat16>;
    of(queries, count, {keys, bytes, size}, {values, bytes, size}, scaling, cap, scratch);
}

// --- packing ---

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: rounds to a whole number

// The product itself: a sum with it is not one instruction, which would round otherwise.
inline Vec times(Vec a, Vec b) {
    Vec product = a * b;
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

inline Vec min(Vec a, Vec b) { return b < a ? b : a; }

inline Vec rounded_to_bf16(Vec x) {
    UIntVec bits = (UIntVec)(x);
    return (Vec)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

// The numbers of a block as they are stored, in any kind but int4.
void pack_exact(const Packing &p, int block) {
    const int group = group_of(p.kind), bytes = bytes_of(p.kind), step = group * bytes;
    char *rows[kBlock], *to = p.packed + block * block_bytes(p.kind, p.in);
    for (int o = 0; o < kBlock; o++) {
        const int64_t row = block * kBlock + o;
        rows[o] = row < p.out ? p.weight + row * p.in * bytes : nullptr;
    }
    for (int k = 0; k < p.in; k += group) {
        const int count = (group < p.in - k ? group : p.in - k) * bytes;
        for (int o = 0; o < kBlock; o++, to += step) {
            char *at = rows[o] + int64_t(k) * bytes;
            if (p.back) {
                if (rows[o]) std::memcpy(at, to, count);
                continue;
            }
            if (!rows[o] || count < step) std::memset(to, 0, step);
            if (!rows[o]) continue;
            if (count == 4) std::memcpy(to, at, 4);  // most often: no call
            else std::memcpy(to, at, count);
        }
    }
}

// A block of int8 from fp32 numbers: each output is divided by its largest number / 127.
void pack_int8(const Packing &p, int block) {
    char *to = p.packed + block * block_bytes(kInt8, p.in);
    const int groups = (p.in + 3) / 4;
    std::vector<float> exact(p.in);
    std::vector<int8_t> numbers(4 * groups);
    for (int o = 0; o < kBlock; o++) {
        const int64_t row = block * kBlock + o;
        float scale = 0.0f;
        int32_t sum = 0;
        if (row < p.out) {
            const float *weight = reinterpret_cast<const float *>(p.weight) + row * p.in;
            uint32_t largest = 0;  // the bits of |x| have the order of |x|, and those of no number are above all
            for (int k = 0; k < p.in; k++) exact[k] = p.of_inputs ? weight[k] / p.of_inputs[k] : weight[k];
            for (int k = 0; k < p.in; k++) {
                uint32_t bits;
                std::memcpy(&bits, &exact[k], 4);
                bits &= 0x7fffffff;
                largest = bits > largest ? bits : largest;
            }
            std::memcpy(&scale, &largest, 4);
            scale /= 127.0f;
            scale = scale < 1e-12f ? 1e-12f : scale;
            for (int k = 0; k < p.in; k++) numbers[k] = int8_t(int32_t(exact[k] / scale + kMagic - kMagic));
            for (int k = 0; k < p.in; k++) sum += numbers[k];
        } else {
            std::memset(numbers.data(), 0, numbers.size());
        }
        for (int k = 0; k < groups; k++) std::memcpy(to + (int64_t(k) * kBlock + o) * 4, &numbers[4 * k], 4);
        char *end = to + int64_t(groups) * kBlock * 4;
        std::memcpy(end + 4 * o, &scale, 4);
        std::memcpy(end + 4 * kBlock + 4 * o, &sum, 4);
    }
}

// For each output and kInputs numbers x of it a scale a, a least number b and the q from 0 to 15 that make a q + b nearest
// to them. Several steps of a grid are tried; each has the a and b of least squares, weighted by the sizes of the inputs,
// for its q, and then its q again. A lane is an output.
void round_to_int4(const Vec *x, const float *sizes, uint8_t (*rounded)[kLanes], float *scales, float *least) {
    constexpr float kSteps[] = {12.0f, 12.5714286f, 13.1428571f, 13.7142857f, 14.2857143f, 14.8571429f, 15.4285714f, 16.0f};
    Vec low = x[0], high = x[0], strange = {};  // not a number if one of them is none
    Vec of_x = {}, of_xx = {};                  // sums of sizes * x and * x * x
    float whole = 0.0f;                         // the sum of sizes
    for (int i = 0; i < kInputs; i++) {
        low = min(low, x[i]);
        high = max(high, x[i]);
        strange += times(x[i], Vec{});
        const Vec weighted = times(all(sizes[i]), x[i]);
        whole += sizes[i];
        of_x += weighted;
        of_xx += times(weighted, x[i]);
    }
    auto nearest = [&](int i, Vec factor, Vec b) {
        return min(max(times(x[i] - b, factor), Vec{}), all(15.0f)) + all(kMagic) - all(kMagic);
    };
    auto inverse = [](Vec a) { return a > Vec{} ? all(1.0f) / a : Vec{}; };
    const Vec range = high - low;
    Vec best_a = rounded_to_bf16(range / all(15.0f)), best_b = low, from_a = best_a, from_b = low, fewest = all(INFINITY);
    for (const float steps : kSteps) {  // as many make the whole range
        Vec a = range / all(steps);
        Vec b = times(all(0.5f), low + high) - times(all(7.5f), a);
        IntVec differ = low == low;  // a lane whose numbers are all the same stops
        for (int again = 0; again < 2; again++) {
            const Vec factor = inverse(a), made_a = a, made_b = b;
            Vec of_q = {}, of_qq = {}, of_xq = {};
            for (int i = 0; i < kInputs; i++) {
                const Vec q = nearest(i, factor, b), weighted = times(all(sizes[i]), q);
                of_q += weighted;
                of_qq += times(weighted, q);
                of_xq += times(weighted, x[i]);
            }
            const Vec sum = all(whole), determinant = times(sum, of_qq) - times(of_q, of_q);
            differ &= determinant > times(times(all(1e-6f), sum), of_qq);
            a = rounded_to_bf16((times(sum, of_xq) - times(of_q, of_x)) / determinant);
            b = rounded_to_bf16((of_x - times(a, of_q)) / sum);
            const Vec error = of_xx - times(all(2.0f), times(a, of_xq) + times(b, of_x)) +
                              times(a, times(a, of_qq) + times(times(all(2.0f), b), of_q)) + times(times(b, b), sum);
            const IntVec is_better = differ & (error < fewest);
            fewest = is_better ? error : fewest;
            best_a = is_better ? a : best_a;
            best_b = is_better ? b : best_b;
            from_a = is_better ? made_a : from_a;
            from_b = is_better ? made_b : from_b;
        }
    }
    const Vec factor = inverse(from_a);
    for (int i = 0; i < kInputs; i++) {
        const Vec q = nearest(i, factor, from_b);
        for (int lane = 0; lane < kLanes; lane++) rounded[i][lane] = uint8_t(q[lane]);
    }
    store(scales, best_a + strange);
    store(least, best_b);
}

// A block of int4 from fp32 numbers.
void pack_int4(const Packing &p, int block) {
    auto *to = reinterpret_cast<uint8_t *>(p.packed + block * block_bytes(kInt4, p.in));
    for (int first = 0; first < p.in; first += kInputs, to += kInputsBytes) {
        const int count = kInputs < p.in - first ? kInputs : p.in - first;
        float sizes[kInputs] = {};
        for (int i = 0; i < count; i++) sizes[i] = p.of_inputs ? p.of_inputs[first + i] : 1.0f;
        for (int begin = 0; begin < kBlock; begin += kLanes) {
            Vec x[kInputs] = {};
            for (int lane = 0; lane < kLanes; lane++) {
                const int64_t row = block * kBlock + begin + lane;
                if (row >= p.out) continue;
                const float *numbers = reinterpret_cast<const float *>(p.weight) + row * p.in + first;
                for (int i = 0; i < count; i++) x[i][lane] = numbers[i];
            }
            uint8_t rounded[kInputs][kLanes];
            float scales[kLanes], least[kLanes];
            round_to_int4(x, sizes, rounded, scales, least);
            for (int lane = 0; lane < kLanes; lane++) {
                uint8_t *bytes = to + 4 * (begin + lane), *of_scale = to + scale_at(begin + lane);
                const uint16_t scale = to_bf16(scales[lane]), lowest = to_bf16(least[lane]);
                std::memcpy(of_scale, &scale, 2);
                std::memcpy(of_scale + 32, &lowest, 2);
                for (int i = 0; i < kInputs; i += 8)
                    for (int j = 0; j < 4; j++)
                        bytes[i / 2 * kBlock + j] = uint8_t(rounded[i + j][lane] | rounded[i + 4 + j][lane] << 4);
            }
        }
    }
}

void unpack_int4(const Packing &p, int block) {
    auto *from = reinterpret_cast<const uint8_t *>(p.packed + block * block_bytes(kInt4, p.in));
    for (int first = 0; first < p.in; first += kInputs, from += kInputsBytes)
        for (int o = 0; o < kBlock; o++) {
            const int64_t row = block * kBlock + o;
            if (row >= p.out) break;
            const int count = kInputs < p.in - first ? kInputs : p.in - first;
            float *numbers = reinterpret_cast<float *>(p.weight) + row * p.in + first;
            uint32_t pair[2] = {};  // scale and least number, in bf16
            std::memcpy(reinterpret_cast<char *>(pair) + 2, from + scale_at(o), 2);
            std::memcpy(reinterpret_cast<char *>(pair + 1) + 2, from + scale_at(o) + 32, 2);
            float scale, least;
            std::memcpy(&scale, pair, 4);
            std::memcpy(&least, pair + 1, 4);
            const uint8_t *bytes = from + 4 * o;
            for (int i = 0; i < count; i++)
                numbers[i] = float(bytes[i / 8 * 4 * kBlock + i % 4] >> (i % 8 / 4 * 4) & 15) * scale + least;
        }
}

void pack(const Packing &p, int block) {
    if (p.kind == kInt4) (p.back ? unpack_int4 : pack_int4)(p, block);
    else (p.kind == kInt8 && !p.back ? pack_int8 : pack_exact)(p, block);
}

// --- recurrences ---

#include "recurrence.h"

// --- the largest of many numbers ---

// Of equal numbers the first one counts. NaN counts as minus infinity.
template <int kind>
float top_of(const char *x, int size, int count, float divisor, bool sums_up, float *values, int64_t *places) {
    constexpr int bytes = kind == kFloat32 ? 4 : 2;
    int found = 0;
    float least = -INFINITY;
    for (int i = 0; i < size; i += kLanes) {
        const int lanes = size - i < kLanes ? size - i : kLanes;
        const Vec v = lanes == kLanes ? load_as(kind, x + i * bytes) : load_some(kind, x + i * bytes, lanes);
        if (found == count && !any(v > all(least))) continue;
        for (int lane = 0; lane < lanes; lane++) {
            if (!(found < count ? v[lane] > -INFINITY : v[lane] > least)) continue;
            int at = found < count ? found++ : count - 1;
            for (; at && values[at - 1] < v[lane]; at--) {
                values[at] = values[at - 1];
                places[at] = places[at - 1];
            }
            values[at] = v[lane];
            places[at] = i + lane;
            least = values[found - 1];
        }
    }
    const float factor = 1.0f / divisor, most = found ? values[0] * factor : 0.0f;
    Vec sums = {};
    for (int i = 0; i < size && sums_up; i += kLanes) {
        const int lanes = size - i < kLanes ? size - i : kLanes;
        Vec v = lanes == kLanes ? load_as(kind, x + i * bytes) : load_some(kind, x + i * bytes, lanes);
        if (lanes < kLanes)
            for (int lane = lanes; lane < kLanes; lane++) v[lane] = -INFINITY;
        sums += exponential(v * factor - most);
    }
    for (int i = found, place = 0; i < count; place++) {  // places that are not among them, each once
        bool is_taken = false;
        for (int j = 0; j < found; j++) is_taken |= places[j] == place;
        if (is_taken) continue;
        values[i] = -INFINITY;
        places[i++] = place;
    }
    for (int i = 0; i < found; i++) values[i] *= factor;
    return most + std::log(total(sums));
}

float top(int kind, const void *x, int size, int count, float divisor, bool sums_up, float *values, int64_t *places) {
    auto *of = kind == kFloat32 ? top_of<kFloat32> : kind == kBFloat16 ? top_of<kBFloat16> : top_of<kFloat16>;
    return of(static_cast<const char *>(x), size, count, divisor, sums_up, values, places);
}

}  // namespace

extern const Kernels KERNELS;
#if defined(__AMX_TILE__)
constexpr Level kLevel = kLevelAmx;
#elif defined(__AVX512BF16__)
constexpr Level kLevel = kLevelAvx512Bf16;
#elif defined(__AVX512VNNI__)
constexpr Level kLevel = kLevelAvx512Vnni;
#elif defined(__AVX512F__)
constexpr Level kLevel = kLevelAvx512;
#elif defined(__AVX2__)
constexpr Level kLevel = kLevelAvx2;
#else
constexpr Level kLevel = kLevelPortable;
#endif
const Kernels KERNELS = {KERNELS_NAME, kLevel, input_bytes, prepare, block, pack, norm, turn, dots, gate, add_silu, store_as, load_from, attend, top, advance, convolve};

}  // namespace draftheads
