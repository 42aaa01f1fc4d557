// What a decoding step computes, for one instruction set. kernels.cpp is compiled once for each of them.
//
// Every sum is added in an order that depends on nothing but its own numbers: not on the other rows of a product, and
// not on the slots in which keys and values lie. So the bits of a token are the same in a text and in any tree.
#pragma once

#include <cstdint>

namespace draftheads {

// How a weight is stored.
enum Kind : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt4 = 4, kKinds = 5 };

constexpr int kBlock = 32;    // outputs of a product that are computed together, and stored side by side
constexpr int kMostHead = 256;  // numbers of a head
constexpr int kMostTogether = 5;
constexpr int kColumns = 32;  // of a recurrence's state that are computed together
constexpr int kInputs = 32;   // of int4 that have a scale and a least number together
constexpr int kInputsBytes = kBlock * (kInputs / 2 + 4);  // of them in a block

// A weight (out, in): blocks of kBlock outputs, in each of them the inputs in groups of four (int8), in pairs (bf16) or
// alone. A block of int8 ends with a scale for each output and, as int32, the sum of its numbers.
//
// int4 has kInputs inputs at a time: numbers from 0 to 15, and then for each output a scale and what 0 stands for, in bf16.
// Of eight neighbours, the first four are the low halves of four bytes and the others the high ones.
struct Weight {
    int32_t kind;
    int32_t inputs;       // the kind of the rows that it multiplies: fp32, or bf16 to which they are rounded
    int32_t out, in;
    const void *packed;
    const float *bias;    // (out,), or null
    const float *smooth;  // (in,) by which rows are multiplied before they are rounded to int8, or null
    const void *low_a, *low_b;  // (rank, in) and (out, rank): B A x is added to the product; or null
    const float *scales;        // (out,) what the sum of both is multiplied by before the bias is added, or null
    int32_t rank, low_kind;
};

inline int blocks_of(int out) { return (out + kBlock - 1) / kBlock; }

// Inputs that are neighbours for each output, and bytes of a number.
constexpr int group_of(int kind) { return kind == kInt8 ? 4 : kind == kBFloat16 ? 2 : 1; }
constexpr int bytes_of(int kind) { return kind == kInt8 ? 1 : kind == kFloat32 ? 4 : 2; }

inline int64_t block_bytes(int kind, int in) {
    if (kind == kInt4) return int64_t(in + kInputs - 1) / kInputs * kInputsBytes;
    const int group = group_of(kind);
    return int64_t(in + group - 1) / group * group * kBlock * bytes_of(kind) + (kind == kInt8 ? 8 * kBlock : 0);
}

// A weight (out, in) to be packed, or to be unpacked: fp32 for int4, and for int8 before it is rounded.
struct Packing {
    char *weight;
    const float *of_inputs;  // (in,) what int8 divides the weights by, or the sizes of the inputs of int4; or null
    char *packed;
    int kind, out, in, back;
};

// x / rms(x) * scale + shift; if it is centred, of x - mean(x).
struct Norm {
    const float *scale, *shift;  // null: there is no norm; no shift
    float epsilon;
    int32_t is_centred;
};

// How a feed-forward part joins its two products: SiLU(gate) * up, or GELU by tanh or by erf or max(gate, 0)^2 in its place; or, with both
// clamped to `limit`, gate * sigmoid(alpha * gate) * (up + 1). Without `up`, what is behind the star is 1. Gates of attention
// have sigmoid(gate) in the place of SiLU.
enum Act : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kClamped = 3, kReluSquared = 4, kSigmoid = 5 };
struct Gate {
    int32_t act;
    float alpha, limit;
};

// Where the scale of an output is, after the numbers of kInputs inputs; its least number is 32 bytes behind it. Those of
// 16 outputs are one line of the cache.
constexpr int scale_at(int output) { return kInputs / 2 * kBlock + output / 16 * 64 + output % 16 * 2; }

// A query of a token, and what it sees of its text: entries start, start + 1, ... end - 1 and those of the list.
struct Query {
    const float *query;
    float *out;
    int32_t start, end;
    const int32_t *list;
    int32_t listed;
    float sink;  // a score that takes a share and adds nothing; minus infinity: there is none
};

// A state (rows, kColumns) of a recurrence becomes decay * state + key added^T.
struct Change {
    const float *key, *added;  // (rows,) and (kColumns,)
    float decay;
};

// A token of a recurrence, for kColumns numbers of its value: what it adds to the state is share * value, or of the delta rule
// share * (value - decay * state^T key); its output is (decay * state + key added^T)^T query + skip * value.
struct Node {
    const float *key, *query, *value;  // (rows,), (rows,), (kColumns,)
    float *added, *out;                // (kColumns,)
    float decay, share, key_query, skip;  // key_query: key . query
    int32_t is_corrected;              // whether by the delta rule
};

// Changes of a state, one after the other, and a token that reads what comes out; without changes nothing is written.
struct Advance {
    const float *from;
    float *to;
    const Change *changes;
    int32_t count, rows;
    const Node *node;  // or null
};

struct Convolution {
    const float *const *inputs;  // (taps,) numbers of `size` neighbouring channels, the oldest first
    const float *weights, *bias;  // (taps, stride), and (size,) or null
    int64_t stride;
    int32_t taps, size, is_activated;
    float *out;
};

// Sets of instructions; each needs those of the ones before it.
enum Level : int { kLevelPortable, kLevelAvx2, kLevelAvx512, kLevelAvx512Vnni, kLevelAvx512Bf16, kLevelAmx };

struct Kernels {
    const char *name;
    Level level;
    // Bytes of one row of inputs, as products with such a weight read it.
    int64_t (*input_bytes)(const Weight &weight);
    // A row of inputs (in,) as products read it.
    void (*prepare)(const Weight &weight, const float *row, void *prepared);
    // `rows` prepared rows times one block of a weight: y (rows, kBlock), without the bias.
    void (*block)(const Weight &weight, int number, const void *prepared, int rows, float *y);
    // Packs a block of outputs, or unpacks it; all sets of instructions round alike.
    void (*pack)(const Packing &packing, int block);
    void (*norm)(const Norm &norm, const float *x, int size, float *out);
    // Turns the first `size` numbers of a head by its position: pairs of number i of the first and the second half, or of
    // neighbours.
    void (*turn)(float *head, const float *cos, const float *sin, int size, bool are_neighbours);
    // The products of `count` rows (count, size) and x, summed in fp32.
    void (*dots)(int kind, const void *rows, const float *x, int count, int size, float *out);
    void (*gate)(const Gate &how, const float *gate, const float *up, int size, float *out);
    // base + SiLU(x).
    void (*add_silu)(const float *base, const float *x, int size, float *out);
    // Stores numbers as fp32 (kFloat32), bf16 or fp16.
    void (*store)(int kind, const float *x, int64_t size, void *out);
    // Loads them.
    void (*load)(int kind, const void *x, int64_t size, float *out);
    // Attention of queries of one text over the same keys and values, entries of `size` numbers with `stride` between
    // them. Scores s become cap * tanh(s / cap); cap 0: they stay. `scratch` has room for the scores of kMostTogether
    // queries, each rounded up to a multiple of 16.
    void (*attend)(int kind, const Query *queries, int count, int size, const char *keys, const char *values,
                   int64_t stride, float scaling, float cap, float *scratch);
    // The `count` largest of x / divisor, the largest first, and their places. Returns log(sum(exp(x / divisor))) where
    // it sums up.
    float (*top)(int kind, const void *x, int size, int count, float divisor, bool sums_up, float *values, int64_t *places);
    void (*advance)(const Advance &advance);
    void (*convolve)(const Convolution &convolution);
};

extern const Kernels kPortable, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx;

}  // namespace draftheads
