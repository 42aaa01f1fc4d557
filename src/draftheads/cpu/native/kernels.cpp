// The kernels of one instruction set: KERNELS names it, and the compiler's options choose its instructions.
#include "kernels.h"

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace draftheads {
namespace {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t UIntVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
constexpr int kLanes = 16;

// How many rows and vectors of outputs a tile has: as many as there are registers for.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVecs = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 5, kTileVecs = 1;
#else
constexpr int kTileRows = 2, kTileVecs = 1;
#endif
#if defined(__AVX512F__) || !defined(__AVX2__)
constexpr int kTileRowsInt8 = kTileRows;
#else
constexpr int kTileRowsInt8 = 4;
#endif
constexpr int kHeader = 64;  // bytes before a row of int8: its scale

constexpr int kAhead = 2048;  // bytes of a weight that are fetched before they are needed

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
    __m512 v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
    return (Vec)(v);
#elif defined(__F16C__)
    Vec v;
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x)));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x + 8)));
    std::memcpy(&v, &low, 32);
    std::memcpy(reinterpret_cast<char *>(&v) + 32, &high, 32);
    return v;
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

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLED(v, ...) __builtin_shuffle(v, IntVec{__VA_ARGS__})
#endif

// The sum of the lanes, always in the same order.
inline float total(Vec v) {
    v += SHUFFLED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

inline float largest(Vec v) {
    float most = v[0];
    for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
    return most;
}

inline Vec max(Vec a, Vec b) {
    IntVec is_less = a < b;
    return is_less ? b : a;
}

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

// A row as int8 with one scale: whole numbers from -127 to 127, or 1 to 255 for instructions that take them unsigned.
void quantise(const float *row, const float *smooth, int in, char *prepared) {
    typedef int8_t ByteVec __attribute__((vector_size(16)));
    Vec most = {}, strange = {};  // strange: not a number if one of them is none
    auto numbers = [&](int i) {
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
    const float largest_of_row = largest(most), factor = largest_of_row > 0.0f ? 127.0f / largest_of_row : 0.0f;
    const float scale = largest_of_row / 127.0f + total(strange);
    std::memcpy(prepared, &scale, 4);
    for (int i = 0; i < in; i += kLanes) {
        const Vec rounded = numbers(i) * factor + all(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
        IntVec whole = (IntVec)(rounded) - 0x4b400000;
#if defined(__AVX512VNNI__)
        whole += 128;
#endif
        const ByteVec bytes = __builtin_convertvector(whole, ByteVec);
        std::memcpy(prepared + kHeader + i, &bytes, kLanes);
    }
}

void prepare(const Weight &weight, const float *row, void *prepared) {
    const int in = weight.in;
    if (weight.kind == kInt8) return quantise(row, weight.smooth, in, static_cast<char *>(prepared));
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
    const __m256i all = _mm256_set1_epi32(given), ones = _mm256_set1_epi16(1);
    __m256i halves[2], of_sums[2];
    std::memcpy(halves, &w, 64);
    std::memcpy(of_sums, &sums, 64);
    for (int i = 0; i < 2; i++) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(halves[i]), _mm256_sign_epi8(all, halves[i]));
        of_sums[i] = _mm256_add_epi32(of_sums[i], _mm256_madd_epi16(pairs, ones));
    }
    std::memcpy(&sums, of_sums, 64);
#else
    for (int j = 0; j < 4; j++) sums += ((w << (24 - 8 * j)) >> 24) * int32_t(static_cast<signed char>(four[j]));
#endif
}

template <int rows, int vecs>
inline void tile_of_int8(const char *weight, const char *const *x, int in, const char *scales, float *y) {
    IntVec sums[rows][vecs] = {};
    const int groups = (in + 3) / 4;
    for (int group = 0; group < groups; group++, weight += 4 * kBlock) {
        IntVec w[vecs];
        for (int v = 0; v < vecs; v++) {
            __builtin_prefetch(weight + kAhead + 64 * v);
            std::memcpy(&w[v], weight + 64 * v, 64);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) add_four(sums[r][v], x[r] + kHeader + 4 * int64_t(group), w[v]);
    }
    for (int v = 0; v < vecs; v++) {
        const Vec of_weight = load(reinterpret_cast<const float *>(scales + 64 * v));
        for (int r = 0; r < rows; r++) {
            float of_row;
            std::memcpy(&of_row, x[r], 4);
#if defined(__AVX512VNNI__)
            IntVec whole;  // the row was taken as its numbers + 128
            std::memcpy(&whole, scales + 4 * kBlock + 64 * v, 64);
            sums[r][v] -= whole << 7;
#endif
            store(y + r * kBlock + v * kLanes, __builtin_convertvector(sums[r][v], Vec) * (of_weight * of_row));
        }
    }
}

template <int kind, int rows, int vecs>
inline void tile(const char *weight, const char *const *x, int in, float *y) {
    Vec sums[rows][vecs] = {};
#if defined(__AVX512BF16__)
    if constexpr (kind == kPairs) {
        for (int pair = 0; pair < (in + 1) / 2; pair++, weight += 4 * kBlock) {
            for (int v = 0; v < vecs; v++) __builtin_prefetch(weight + kAhead + 64 * v);
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
            for (int v = 0; v < vecs; v++) __builtin_prefetch(weight + kAhead + 64 * v);
            Vec low[vecs], high[vecs];
            for (int v = 0; v < vecs; v++) {
                UIntVec both;
                std::memcpy(&both, weight + 64 * v, 64);
                UIntVec first = both << 16, second = both & 0xffff0000u;
                low[v] = (Vec)(first);
                high[v] = (Vec)(second);
            }
            for (int r = 0; r < rows; r++) {
                float two[2];
                std::memcpy(two, x[r] + 8 * pair, 8);
                for (int v = 0; v < vecs; v++) sums[r][v] += low[v] * two[0];
                for (int v = 0; v < vecs; v++) sums[r][v] += high[v] * two[1];
            }
        }
    } else {
        constexpr int bytes = kind == kFloat32 ? 4 : 2;
        for (int k = 0; k < in; k++, weight += bytes * kBlock) {
            for (int v = 0; v < vecs; v++) __builtin_prefetch(weight + kAhead + bytes * kLanes * v);
            Vec w[vecs];
            for (int v = 0; v < vecs; v++) w[v] = load_as(kind, weight + bytes * kLanes * v);
            for (int r = 0; r < rows; r++) {
                float one;
                std::memcpy(&one, x[r] + 4 * int64_t(k), 4);
                for (int v = 0; v < vecs; v++) sums[r][v] += w[v] * one;
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store(y + r * kBlock + v * kLanes, sums[r][v]);
}

template <int kind, int rows>
void tiles(const char *weight, const char *const *x, int in, float *y) {
    if constexpr (kind == kInt8) {
        const char *scales = weight + block_bytes(kInt8, in) - 8 * kBlock;
        for (int v = 0; v < kBlock / kLanes; v += kTileVecs)
            tile_of_int8<rows, kTileVecs>(weight + 4 * kLanes * v, x, in, scales + 4 * kLanes * v, y + v * kLanes);
        return;
    }
    constexpr int bytes = kind == kFloat16 ? 2 : 4;  // of a lane: a number, or a bf16 pair
    for (int v = 0; v < kBlock / kLanes; v += kTileVecs)
        tile<kind, rows, kTileVecs>(weight + bytes * kLanes * v, x, in, y + v * kLanes);
}

typedef void (*Tiles)(const char *, const char *const *, int, float *);

template <int kind, int... rows>
struct Table {
    static constexpr Tiles of[] = {nullptr, tiles<kind, rows>...};
};
#if defined(__AVX512F__)
template <int kind> using Sizes = Table<kind, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>;
#elif defined(__AVX2__)
template <int kind> using Sizes = Table<kind, 1, 2, 3, 4, 5>;
#else
template <int kind> using Sizes = Table<kind, 1, 2>;
#endif

void block(const Weight &weight, int number, const void *prepared, int rows, float *y) {
    const int in = weight.in, most = weight.kind == kInt8 ? kTileRowsInt8 : kTileRows;
    const char *packed = static_cast<const char *>(weight.packed) + number * block_bytes(weight.kind, in);
    const int64_t stride = input_bytes(weight);
    const char *x = static_cast<const char *>(prepared);
    const int pieces = (rows + most - 1) / most;
    for (int piece = 0, first = 0; piece < pieces; piece++) {
        const int end = int(int64_t(rows) * (piece + 1) / pieces), count = end - first;
        const char *of[kTileRows];
        for (int r = 0; r < count; r++) of[r] = x + (first + r) * stride;
        float *out = y + first * kBlock;
        if (weight.kind == kInt8) Sizes<kInt8>::of[count](packed, of, in, out);
        else if (weight.kind == kFloat32) Sizes<kFloat32>::of[count](packed, of, in, out);
#if defined(__AVX512BF16__)
        else if (reads_bf16(weight)) Sizes<kPairs>::of[count](packed, of, in, out);
#endif
        else if (weight.kind == kBFloat16) Sizes<kBFloat16>::of[count](packed, of, in, out);
        else Sizes<kFloat16>::of[count](packed, of, in, out);
        first = end;
    }
}

// --- the rest of a layer ---

void norm(const float *x, const float *scale, float epsilon, int size, float *out) {
    Vec squares = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
    float sum = total(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(sum / float(size) + epsilon);
    for (i = 0; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * factor * load(scale + i));
    for (; i < size; i++) out[i] = x[i] * factor * scale[i];
}

void turn(float *head, const float *cos, const float *sin, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i++) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cos[i] - second * sin[i];
        head[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

inline Vec activated(int act, Vec x) {
    if (act == 0) return x / (all(1.0f) + exponential(-x));  // SiLU
    const Vec inner = all(1.5957691216057308f) * (x + all(0.044715f) * x * x * x);  // GELU by tanh: x * sigmoid(2 ...)
    return x / (all(1.0f) + exponential(-inner));
}

void gate(int act, const float *gate, const float *up, int size, float *out) {
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, activated(act, load(gate + i)) * load(up + i));
    if (i == size) return;
    float g[kLanes] = {}, u[kLanes] = {}, o[kLanes];
    std::memcpy(g, gate + i, 4 * (size - i));
    std::memcpy(u, up + i, 4 * (size - i));
    store(o, activated(act, load(g)) * load(u));
    std::memcpy(out + i, o, 4 * (size - i));
}

// A key or a value: whole vectors, and a last one that may be shorter.
template <int kind>
inline void load_head(const char *x, int size, Vec *head) {
    constexpr int bytes = kind == kFloat32 ? 4 : 2;
    const int whole = size / kLanes;
    for (int v = 0; v < whole; v++) head[v] = load_as(kind, x + v * kLanes * bytes);
    if (size % kLanes) head[whole] = load_some(kind, x + whole * kLanes * bytes, size % kLanes);
}

template <int kind>
void attend_to(const float *queries, int heads, int size, const char *keys, const char *values, int64_t key_stride,
               int64_t value_stride, int first, int end, const int32_t *list, int listed, float scaling, float *scores,
               float *out) {
    constexpr int bytes = kind == kFloat32 ? 4 : 2;
    const int text = end - first, count = text + listed, width = (count + kLanes - 1) / kLanes * kLanes;
    const int vecs = (size + kLanes - 1) / kLanes;
    Vec of_entry[kMostHead / kLanes], query[kMostHead / kLanes];
    auto slot = [&](int e) { return int64_t(e < text ? first + e : list[e - text]); };
    for (int e = 0; e < count; e++) {
        load_head<kind>(keys + slot(e) * key_stride * bytes, size, of_entry);
        for (int h = 0; h < heads; h++) {
            load_head<kFloat32>(reinterpret_cast<const char *>(queries + int64_t(h) * size), size, query);
            Vec sum = query[0] * of_entry[0];
            for (int v = 1; v < vecs; v++) sum += query[v] * of_entry[v];
            scores[int64_t(h) * width + e] = total(sum) * scaling;
        }
    }
    for (int h = 0; h < heads; h++) {
        float *row = scores + int64_t(h) * width;
        for (int e = count; e < width; e++) row[e] = -INFINITY;
        Vec most = all(-INFINITY);
        for (int e = 0; e < width; e += kLanes) most = max(most, load(row + e));
        const Vec top = all(largest(most));
        Vec sums = {};
        for (int e = 0; e < width; e += kLanes) {
            const Vec weight = exponential(load(row + e) - top);
            store(row + e, weight);
            sums += weight;
        }
        const float factor = 1.0f / total(sums);
        Vec mixed[kMostHead / kLanes] = {};
        for (int e = 0; e < count; e++) {
            load_head<kind>(values + slot(e) * value_stride * bytes, size, of_entry);
            for (int v = 0; v < vecs; v++) mixed[v] += of_entry[v] * row[e];
        }
        float padded[kMostHead];
        for (int v = 0; v < vecs; v++) store(padded + v * kLanes, mixed[v] * factor);
        std::memcpy(out + int64_t(h) * size, padded, 4 * size);
    }
}

void attend(int kind, const float *queries, int heads, int size, const char *keys, const char *values,
            int64_t key_stride, int64_t value_stride, int first, int end, const int32_t *list, int listed,
            float scaling, float *scores, float *out) {
    auto *of = kind == kFloat32 ? attend_to<kFloat32> : kind == kBFloat16 ? attend_to<kBFloat16> : attend_to<kFloat16>;
    of(queries, heads, size, keys, values, key_stride, value_stride, first, end, list, listed, scaling, scores, out);
}

}  // namespace

extern const Kernels KERNELS;
#if defined(__AVX512BF16__)
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
const Kernels KERNELS = {KERNELS_NAME, kLevel, input_bytes, prepare, block, norm, turn, gate, store_as, load_from, attend};

}  // namespace draftheads
