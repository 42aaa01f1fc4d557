// One pass of a model's layers over the tokens of all rows, and products alone. The interface is plain C.
#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "kernels.h"

namespace draftheads {
namespace {

inline void rest() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A job is a sequence of parts, and a part a number of tasks. Free threads take the next tasks, fewer the fewer are left,
// and go on to the next part when all tasks of one are done. So a thread that has no core, because of another program, delays nobody unless it has
// a task. It may come late: the number of the job beside each count tells it that its job is over.
struct alignas(64) Part {
    std::atomic<uint64_t> next{0};  // the job's number and, below it, the next task
    std::atomic<int32_t> done{0};
};

// What a job needs, as plain words: a late thread may read them while they change, and then sees that its job is over.
struct Job {
    void (*work)(const Job &, uint32_t number);
    uint64_t words[96];
};

class Pool {
  public:
    static constexpr int kMostParts = 16384;

    void resize(int threads) {
        if (threads == wanted_) return;
        wanted_ = threads;
        stop_ = true;
        wake();
        for (auto &thread : threads_) thread.join();
        threads_.clear();
        stop_ = false;
        const uint32_t now = number_.load();
        try {
            for (int i = 1; i < threads; i++) threads_.emplace_back([this, now] { serve(now); });
        } catch (const std::system_error &) {  // the system gives no more threads: those that are there do
        }
        size_ = int(threads_.size()) + 1;
    }

    int size() const { return size_; }

    // Of the next job.
    uint32_t next() const { return number_.load(std::memory_order_relaxed) + 1; }

    void run(const Job &job, int parts) {
        const uint32_t number = next();
        for (int i = 0; i < parts; i++) {
            parts_[i].next.store(uint64_t(number) << 32, std::memory_order_relaxed);
            parts_[i].done.store(0, std::memory_order_relaxed);
        }
        std::atomic_thread_fence(std::memory_order_release);  // who sees a word of this job sees that the last one is over
        static_assert(sizeof(Job) % 8 == 0, "copied in words");
        uint64_t words[sizeof(Job) / 8];
        std::memcpy(words, &job, sizeof job);
        for (size_t i = 0; i < sizeof(Job) / 8; i++) job_[i].store(words[i], std::memory_order_relaxed);
        if (size_ > 1) wake();
        else number_.store(number);
        job.work(job, number);
    }

    // Takes part in the tasks 0 ... tasks-1 of a part. False if the job is over.
    template <class Task>
    bool share(int part, uint32_t number, int tasks, const Task &task) {
        Part &p = parts_[part];
        for (;;) {
            uint64_t next = p.next.load(std::memory_order_acquire);
            int first, count;
            do {
                if (uint32_t(next >> 32) != number) return false;
                first = int32_t(uint32_t(next));
                count = std::max(1, (tasks - first) / (2 * size_));  // neighbours: their weights are, too
                if (first >= tasks) break;
            } while (!p.next.compare_exchange_weak(next, next + count, std::memory_order_acq_rel));
            if (first >= tasks) break;
            for (int i = first; i < first + count; i++) task(i);
            p.done.fetch_add(count, std::memory_order_release);
        }
        for (int spins = 0; p.done.load(std::memory_order_acquire) < tasks; spins++) {
            if (uint32_t(p.next.load(std::memory_order_relaxed) >> 32) != number) return false;
            if (spins < kSpins) rest();
            else std::this_thread::yield();  // another program has the core of a thread that has a task
        }
        return true;
    }

  private:
    static constexpr int kSpins = 3000;  // some 50 microseconds

    void wake() {
        number_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) {
#if defined(__linux__)
            syscall(SYS_futex, reinterpret_cast<uint32_t *>(&number_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
        }
    }

    void serve(uint32_t seen) {
        for (;;) {
            uint32_t number;
            for (int spins = 0; (number = number_.load(std::memory_order_acquire)) == seen; spins++) {
                if (spins < kSpins) {
                    rest();
                    continue;
                }
#if defined(__linux__)
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                syscall(SYS_futex, reinterpret_cast<uint32_t *>(&number_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
#else
                std::this_thread::yield();
#endif
            }
            if (stop_) return;
            uint64_t words[sizeof(Job) / 8];
            for (size_t i = 0; i < sizeof(Job) / 8; i++) words[i] = job_[i].load(std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_acquire);
            seen = number;
            if (number_.load(std::memory_order_relaxed) != number) continue;
            Job job;
            std::memcpy(&job, words, sizeof job);
            job.work(job, number);
        }
    }

    std::vector<std::thread> threads_;
    std::vector<Part> parts_ = std::vector<Part>(kMostParts);
    std::atomic<uint64_t> job_[sizeof(Job) / 8] = {};
    std::atomic<uint32_t> number_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    int size_ = 1, wanted_ = 1;
};

Pool *pool = new Pool();  // never goes: at the end of the process its threads may still look at it
std::mutex turns;  // one pass or product at a time
const Kernels *kernels = &kPortable;

// The sets that were compiled, the fastest first.
const Kernels *const kSets[] = {KERNEL_SETS};

// Whether this machine has AMX, and Linux lets this process use it: it asks once.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
    static const bool is_there = [] {
        unsigned a, b, c, d;
        constexpr unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
        constexpr int kRequestPermission = 0x1023, kTileData = 18;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
               syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return is_there;
#else
    return false;
#endif
}

bool supports(const Kernels &set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool is_there = true;
    switch (set.level) {
        case kLevelAmx: is_there &= has_amx(); [[fallthrough]];
        case kLevelAvx512Bf16: is_there &= __builtin_cpu_supports("avx512bf16") != 0; [[fallthrough]];
        case kLevelAvx512Vnni: is_there &= __builtin_cpu_supports("avx512vnni") != 0; [[fallthrough]];
        case kLevelAvx512:
            is_there &= __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
            [[fallthrough]];
        case kLevelAvx2: is_there &= __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); break;
        default: break;
    }
    return is_there;
#else
    return set.level == kLevelPortable;
#endif
}

}  // namespace

// Several feed-forward parts, of which a router chooses some for each token.
struct Experts {
    const Weight *weights;             // (count, 3): gate, up and down of each, or up, nothing and down; then, if there is one, those of the shared expert
    const float *router, *router_bias;  // (count, size) and (count,), or null
    const float *choice_bias;           // (count,) that is added to scores for the choice alone; or null
    const float *shared_gate;           // (size,): the share of the shared expert is its sigmoid; or null: the share is 1
    int32_t count, chosen;  // of a token, with the shared one
    int32_t share_of_all;  // an expert's share is its probability among all, not among the chosen ones
    int32_t is_shared;     // whether there is a shared expert, which all tokens choose
    int32_t are_sigmoids;  // scores are sigmoids, and shares proportional to them
    float added, scaling;  // to the sum of the chosen sigmoids; of shares
};

int inner_of(const Experts &e) { return std::max(e.weights->out, e.is_shared ? e.weights[3 * e.count].out : 0); }

// Where the row lies that the gate (0), up (1) or down (2) of an expert reads. Rows of the shared one are the last.
int64_t row_at(const Experts &e, int which, int64_t place, int tokens) {
    const int64_t others = int64_t(tokens) * (e.chosen - e.is_shared), bytes = kernels->input_bytes(e.weights[which]);
    return place <= others ? place * bytes : others * bytes + (place - others) * kernels->input_bytes(e.weights[3 * e.count + which]);
}

// Where numbers lie among the outputs of a layer's first products: those of the first group, and how far groups are apart.
struct Place {
    int32_t first, step;
};
enum { kQueries, kKeys, kValues, kGates, kShares, kSteps, kPlaces };  // of a recurrence

// What a layer has in place of attention or beside it.
struct Recurrence {
    Weight out;
    const float *taps, *tap_bias;  // (taps, channels) of the convolution, and (channels,) or null
    const float *decay, *step_bias, *skip;  // (heads,): a step decays by e^(decay * softplus(step + bias)); skip may be null
    Norm norm;                     // of the outputs of all heads
    Place places[kPlaces];
    int32_t place, unused;         // among the layers of its kind
};

constexpr int kMostProducts = 6, kMostTaps = 16;

// What a layer of any family computes. A norm without a scale is not there. Without qkv it has a feed-forward part alone,
// without gate_up and experts it has none, and without out no attention.
struct Layer {
    Weight qkv[kMostProducts], out, gate_up[2], down;  // the last ones of qkv may be empty; those of a recurrence are behind others
    Norm norm, after_attention, middle, after_mlp, query_norm, key_norm;
    const float *sinks;      // (heads,), or null
    const Experts *experts;  // in place of gate_up and down, or null
    int32_t window;          // tokens that a token sees; 0: all
    int32_t turns;           // which cosines and sines its queries and keys have; -1: none
    const Recurrence *recurrence;  // or null
    int32_t cache, unused;         // where its keys and values are: layers of attention before it
};

// Of all recurrences of a model. `heads` of a group have the same query and key.
enum MixingKind : int { kNoMixing = 0, kDeltaRule = 1, kStateSpace = 2, kShortConvolution = 3 };
struct Mixing {
    int32_t kind, groups, heads, rows, values, taps;  // rows: numbers of a key; values: of a head's value
    int32_t normed;       // numbers of outputs that are normed together; 0: none
    int32_t gates_first;  // outputs are gated before they are normed
    float share_factor;   // of the delta rule, times sigmoid(share)
    float least_step, most_step;
    int32_t unused;
};

struct Model {
    int32_t size, heads, groups, head_size;
    int32_t turned;                                    // numbers of a head that turn by its position
    int32_t key_first, value_first, query_step, key_step;  // where heads lie among the outputs of qkv
    int32_t layers, cache_kind, state_kind, embedding_kind, vocab;
    int32_t is_parallel;        // attention and feed-forward part read the same states
    int32_t turns_neighbours;   // pairs that turn are neighbours, not halves of a head
    int32_t norms_whole;        // query_norm and key_norm are of all heads together
    int32_t has_gates;          // behind a head's query is its gate, whose sigmoid its output is multiplied by
    int32_t caches;             // layers of attention
    float scaling, cap;         // of scores
    float embedding_scale, residual_scale;  // of embeddings, and of what is added to the states
    Gate gate;
    Norm final;
    const Layer *of_layers;
    const void *embedding;  // (vocab, size); of int8 as a weight that is packed
    const float *embedding_smooth;  // (size,) of int8, or null
    const float *positions;  // (num_positions, size) that are added to embeddings, or null
    int32_t num_positions, recurrences;
    Mixing mixing;
};

// The tokens of a pass: those of a text are neighbours, and are written after it.
struct Pass {
    int32_t tokens, texts, words, kept;
    const int64_t *ids;         // (tokens,)
    void *const *memory;        // (texts,) keys and values: (layers, 2, groups, slots, head_size)
    const int32_t *slots;       // (texts,) for which there is memory
    const int32_t *lengths;     // (texts,) how many tokens each text has before the pass
    const int32_t *counts;      // (texts,) tokens of each text in the pass
    const int32_t *depths;      // (tokens,) levels below the first token of the same text
    const uint64_t *ancestors;  // (tokens, words): bit m: sees the m-th node of its text; null: all of the text before it, and itself
    const float *cos, *sin;     // (tables, num_turns, turned), of positions 0, 1, ..., or of the tokens
    int32_t num_turns;
    int32_t of_tokens;          // whether of the tokens
    int32_t last_position;      // texts that are longer stay at it
    int32_t drafted;            // nodes of each text's tree that earlier passes left behind it; those of this pass follow
    const int32_t *kept_layers;  // (kept,) whose inputs are kept
    void *kept_states;           // (tokens, kept, size)
    void *states;                // (tokens, size): after the last layer's norm
    // Of recurrent layers, see walk.h. A pass without tokens moves states behind accepted nodes.
    float *const *states_of_texts;      // (texts,) their states
    float *const *records;              // (texts,) (recurrences, slots, record) that a tree is written to
    const float *const *old_records;    // (texts,) those of the pass before
    const int32_t *record_slots, *old_slots;  // (texts,)
    const int32_t *accepted_first;      // (texts + 1,) among `accepted`
    const int32_t *accepted;            // nodes of the pass before that the text goes on with
};

namespace {

// What a token needs to know of its text.
struct Token {
    int32_t text, first, length, position;  // first: the first token of the text in the pass
    int32_t parent, child, sibling;         // -1: none; of a parent the first child, of which the others are siblings
};

// A row of an embedding.
void embed(int kind, const void *embedding, const float *smooth, int64_t token, int size, float *out) {
    auto *from = static_cast<const char *>(embedding);
    if (kind != kInt8) return kernels->load(kind, from + token * size * bytes_of(kind), size, out);
    const int64_t bytes = block_bytes(kInt8, size), place = 4 * (token % kBlock);
    from += token / kBlock * bytes + place;
    float scale;
    std::memcpy(&scale, from + bytes - 8 * kBlock, 4);
    for (int i = 0; i < size; i++) {
        const float number = scale * float(static_cast<signed char>(from[i / 4 * 4 * kBlock + i % 4]));
        out[i] = smooth ? number * smooth[i] : number;
    }
}

// Memory of the passes, one after the other. It only grows, because a late thread may look at it.
struct Buffers {
    std::vector<char> inputs;  // (tokens,) prepared
    std::vector<float> states, branch, qkv, attended, inner, low, shares, mixed;
    std::vector<Token> tokens;
    std::vector<int32_t> groups, chosen, places, used, first_tokens;
    std::vector<int64_t> best;
};

Buffers &buffers = *new Buffers();  // never goes, as the pool

// What a thread needs to know of a layer before it has a task: one word, with the job's number, because a late thread may
// read it while the next job's is written.
struct Outline {
    static constexpr int kMostBlocks = 1 << 13;
    uint64_t word;

    static uint64_t of(uint32_t number, int qkv_blocks, int inner_blocks, bool attention_waits, bool mlp_waits, bool has_experts,
                       bool is_recurrent, bool attends) {
        return uint64_t(number) << 32 | uint64_t(qkv_blocks) << 19 | uint64_t(inner_blocks) << 6 | attends << 4 | is_recurrent << 3 |
               attention_waits << 2 | mlp_waits << 1 | int(has_experts);
    }
    uint32_t number() const { return uint32_t(word >> 32); }
    int qkv_blocks() const { return word >> 19 & (kMostBlocks - 1); }
    int inner_blocks() const { return word >> 6 & (kMostBlocks - 1); }
    bool attends() const { return word >> 4 & 1; }
    bool is_recurrent() const { return word >> 3 & 1; }
    bool attention_waits() const { return word >> 2 & 1; }
    bool mlp_waits() const { return word >> 1 & 1; }
    bool has_experts() const { return word & 1; }
};
constexpr int kMostLayers = 800;
std::atomic<uint64_t> outlines[kMostLayers];

template <class T>
T *room(std::vector<T> &buffer, int64_t size) {
    if (int64_t(buffer.size()) < size) buffer.resize(size);
    return buffer.data();
}

// What a pass has, by value: a late thread reads nothing else before it has a task.
struct Work {
    Model model;
    Pass pass;
    char *inputs;  // (3 or more, tokens,) rows of `widest` bytes at most: prepared for several weights
    float *states, *branch, *qkv, *attended, *inner;  // branch: what is added to the states after a norm
    float *low;    // (kMostProducts, tokens, most_rank) A x of what is prepared
    float *mixed;  // of recurrent layers, see walk.h
    int64_t widest, most_rank, width;  // width: of a row of qkv
    const Token *tokens;
    const int32_t *first_tokens;  // (texts,)
    const int32_t *groups;  // of tokens that attend together: the first token of each, and the number of all
    int32_t num_groups, head_parts;
    // Of experts: of each token those that are chosen, their shares and their rows among those of all experts; and for
    // each of `slots` experts which one it is and its first row, and behind the last one the number of rows.
    int32_t *chosen, *places, *used;
    float *shares;
    int32_t slots, most_chosen;
};
static_assert(sizeof(Work) <= sizeof(Job::words), "a job holds it");

// Whether both weights read a row in the same form, so that it is prepared once.
bool reads_alike(const Weight &a, const Weight &b) {
    return a.in == b.in && a.kind == b.kind && a.inputs == b.inputs && a.smooth == b.smooth;
}

// A block of outputs of a weight: y (rows, kBlock) = prepared rows times it, plus its bias and its low-rank addition, of
// which `low` has A x of each row. Returns how many outputs the block has.
int multiply_block(const Weight &weight, int block, const char *inputs, int rows, float *y, const float *low = nullptr,
                   int64_t most_rank = 0) {
    kernels->block(weight, block, inputs, rows, y);
    const int first = block * kBlock, outputs = std::min(kBlock, weight.out - first);
    if (weight.scales)
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) y[r * kBlock + o] *= weight.scales[first + o];
    if (weight.bias)
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) y[r * kBlock + o] += weight.bias[first + o];
    if (weight.rank)
        for (int r = 0; r < rows; r++) {
            float added[kBlock];
            const int64_t at = int64_t(first) * weight.rank * bytes_of(weight.low_kind);
            kernels->dots(weight.low_kind, static_cast<const char *>(weight.low_b) + at, low + r * most_rank, outputs, weight.rank,
                          added);
            for (int o = 0; o < outputs; o++) y[r * kBlock + o] += weight.scales ? weight.scales[first + o] * added[o] : added[o];
        }
    return outputs;
}

float *outputs_of_thread(int64_t size) {
    static thread_local std::vector<float> y;
    return room(y, size);
}

// y = prepared rows times the weight: `done(first output, outputs, y (rows, kBlock))` takes each block.
template <class OfWeight, class Done>
bool multiply(int part, uint32_t number, int out, const OfWeight &of, const char *inputs, int rows, const Done &done,
              const float *low = nullptr, int64_t most_rank = 0) {
    return pool->share(part, number, blocks_of(out), [&](int block) {
        float *y = outputs_of_thread(int64_t(rows) * kBlock);
        const int outputs = multiply_block(of(), block, inputs, rows, y, low, most_rank);
        done(block * kBlock, outputs, y);
    });
}

// The keys of a group of a text, or its values: those of group m.groups + group.
char *keys_at(const Model &m, const Pass &p, int text, int layer, int group) {
    const int64_t slots = (int64_t(m.of_layers[layer].cache) * 2 * m.groups + group) * p.slots[text];
    return static_cast<char *>(p.memory[text]) + slots * m.head_size * bytes_of(m.cache_kind);
}

// Attention of some neighbouring tokens of a text, and some heads of a group.
void attend(const Work &work, const Layer &layer, int index, int first_token, int count, int group, int first_head, int heads) {
    const Model &m = work.model;
    const Pass &p = work.pass;
    const int per_group = m.heads / m.groups;
    const int length = work.tokens[first_token].length, text = work.tokens[first_token].first;
    static thread_local std::vector<int32_t> lists;
    static thread_local std::vector<float> scratch;
    static thread_local std::vector<Query> queries;
    queries.clear();
    lists.resize(int64_t(count) * (p.drafted + first_token + count - text));
    int64_t most = 0, listed_before = 0;
    for (int token = first_token; token < first_token + count; token++) {
        const int node = p.drafted + token - text, position = length + p.depths[token];
        const int from = layer.window ? std::max(0, position - layer.window + 1) : 0;
        int32_t *list = lists.data() + listed_before;
        int end = length, listed = 0;
        if (!p.ancestors) {
            end = length + node + 1;
        } else {
            const uint64_t *bits = p.ancestors + int64_t(token) * p.words;
            for (int other = 0; other <= node; other++)
                if ((bits[other / 64] >> (other % 64) & 1) && (other < p.drafted || length + p.depths[text + other - p.drafted] >= from))
                    list[listed++] = length + other;
        }
        listed_before += listed;
        const int start = std::min(from, end);
        most = std::max<int64_t>(most, end - start + listed);
        for (int head = group * per_group + first_head; head < group * per_group + first_head + heads; head++)
            queries.push_back({work.qkv + token * work.width + int64_t(head) * m.query_step,
                               work.attended + (int64_t(token) * m.heads + head) * m.head_size, start, end, list, listed,
                               layer.sinks ? layer.sinks[head] : -INFINITY});
    }
    scratch.resize(kMostTogether * ((most + 15) / 16 * 16));
    const int row = work.tokens[first_token].text;
    kernels->attend(m.cache_kind, queries.data(), int(queries.size()), m.head_size, keys_at(m, p, row, index, group),
                    keys_at(m, p, row, index, m.groups + group), m.head_size, m.scaling, m.cap, scratch.data());
}

// Queries and keys turn by their position; keys and values go to their slots.
void turn_and_store(const Work &work, const Layer &layer, int index, int token) {
    const Model &m = work.model;
    const Pass &p = work.pass;
    const int size = m.head_size;
    const Token &t = work.tokens[token];
    float *queries = work.qkv + token * work.width, *keys = queries + m.key_first;
    if (m.norms_whole) {
        if (layer.query_norm.scale) kernels->norm(layer.query_norm, queries, m.heads * size, queries);
        if (layer.key_norm.scale) kernels->norm(layer.key_norm, keys, m.groups * size, keys);
    }
    const int64_t place = int64_t(layer.turns) * p.num_turns + (p.of_tokens ? token : t.position);
    auto turn = [&](float *head, const Norm &norm) {
        if (norm.scale && !m.norms_whole) kernels->norm(norm, head, size, head);
        if (layer.turns >= 0) kernels->turn(head, p.cos + place * m.turned, p.sin + place * m.turned, m.turned, m.turns_neighbours);
    };
    for (int head = 0; head < m.heads; head++) turn(queries + int64_t(head) * m.query_step, layer.query_norm);
    for (int group = 0; group < m.groups; group++) turn(keys + int64_t(group) * m.key_step, layer.key_norm);
    const int64_t at = (t.length + p.drafted + token - t.first) * int64_t(size) * bytes_of(m.cache_kind);
    for (int group = 0; group < m.groups; group++) {
        const int64_t step = int64_t(group) * m.key_step;
        kernels->store(m.cache_kind, keys + step, size, keys_at(m, p, t.text, index, group) + at);
        kernels->store(m.cache_kind, queries + m.value_first + step, size, keys_at(m, p, t.text, index, m.groups + group) + at);
    }
}

#include "walk.h"

// What was attended to (heads, head_size), times sigmoids.
void close_gates(const Work &work, int token, float *row) {
    const Model &m = work.model;
    for (int head = 0; head < m.heads; head++, row += m.head_size) {
        const float *gate = work.qkv + token * work.width + int64_t(head) * m.query_step + m.head_size;
        kernels->gate({kSigmoid, 0.0f, 0.0f}, gate, row, m.head_size, row);
    }
}

// The experts of a token: those of the largest scores, of equal ones the first.
void choose_experts(const Work &work, const Experts &experts, const float *row, int token) {
    static thread_local std::vector<float> scores;
    const int count = experts.count, chosen = experts.chosen - experts.is_shared;
    scores.resize(count);
    kernels->dots(kFloat32, experts.router, row, count, work.model.size, scores.data());
    if (experts.router_bias)
        for (int e = 0; e < count; e++) scores[e] += experts.router_bias[e];
    int32_t *of = work.chosen + int64_t(token) * work.most_chosen;
    float *shares = work.shares + int64_t(token) * work.most_chosen, total = 0.0f;
    if (experts.are_sigmoids)
        for (int e = 0; e < count; e++) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    auto choice = [&](int e) { return scores[e] + (experts.choice_bias ? experts.choice_bias[e] : 0.0f); };
    int found = 0;
    for (int e = 0; e < count; e++) {
        if (found == chosen && !(choice(e) > choice(of[found - 1]))) continue;
        int at = found < chosen ? found++ : found - 1;
        for (; at && choice(e) > choice(of[at - 1]); at--) of[at] = of[at - 1];
        of[at] = e;
    }
    auto weight = [&, most = scores[of[0]]](int e) { return experts.are_sigmoids ? scores[e] : std::exp(scores[e] - most); };
    for (int i = 0; i < found; i++) total += shares[i] = weight(of[i]);
    if (experts.share_of_all) {
        total = experts.are_sigmoids ? 1.0f : 0.0f;
        for (int e = 0; e < count && !experts.are_sigmoids; e++) total += weight(e);
    } else if (experts.are_sigmoids) {
        total += experts.added;
    }
    for (int i = 0; i < found; i++) shares[i] = shares[i] / total * experts.scaling;
    if (!experts.is_shared) return;
    of[found] = count;
    shares[found] = 1.0f;
    if (!experts.shared_gate) return;
    kernels->dots(kFloat32, experts.shared_gate, row, 1, work.model.size, &shares[found]);
    shares[found] = 1.0f / (1.0f + std::exp(-shares[found]));
}

// The rows of all tokens, expert by expert, so that each of them is read once.
void order_rows(const Work &work, const Experts &experts) {
    static thread_local std::vector<int32_t> first;
    const int count = experts.count + experts.is_shared;
    first.assign(count + 1, 0);
    const int tokens = work.pass.tokens;
    auto chosen = [&](int token, int i) { return work.chosen[int64_t(token) * work.most_chosen + i]; };
    for (int token = 0; token < tokens; token++)
        for (int i = 0; i < experts.chosen; i++) first[chosen(token, i) + 1]++;
    int slot = 0, rows = 0;
    for (int e = 0; e < count; e++) {
        const int of_expert = first[e + 1];
        first[e] = rows;
        if (!of_expert) continue;
        work.used[2 * slot] = e;
        work.used[2 * slot++ + 1] = rows;
        rows += of_expert;
    }
    for (; slot <= work.slots; slot++) {
        work.used[2 * slot] = -1;
        work.used[2 * slot + 1] = rows;
    }
    for (int token = 0; token < tokens; token++)
        for (int i = 0; i < experts.chosen; i++) work.places[int64_t(token) * work.most_chosen + i] = first[chosen(token, i)]++;
}

constexpr int kPartsOfLayer = 17;
constexpr int kTogether = 16;  // queries that share their keys and values, about

float *row_of_thread(int64_t size) {
    static thread_local std::vector<float> row;
    return room(row, size);
}

void pass_of(const Job &job, uint32_t number) {
    Work work;
    std::memcpy(&work, job.words, sizeof work);
    const Model &m = work.model;
    const Pass &p = work.pass;
    const int tokens = p.tokens, size = m.size, joined = m.heads * m.head_size;
    int part = 0;
    auto each = [&](auto task) { return pool->share(part++, number, tokens, task); };
    auto state = [&](int token) { return work.states + int64_t(token) * size; };
    auto branch = [&](int token) { return work.branch + int64_t(token) * size; };
    // of weights that read the same rows
    auto inputs = [&](const Weight *weights, int which) {
        return work.inputs + (reads_alike(weights[0], weights[which]) ? 0 : which * tokens * work.widest);
    };
    auto low = [&](int which) { return work.low + which * tokens * work.most_rank; };
    auto prepare = [&](const Weight *weights, int count, const float *row, int token) {
        for (int which = 0; which < count; which++) {
            const Weight &weight = weights[which];
            if (!weight.out) continue;
            if (!which || !reads_alike(weights[0], weight))
                kernels->prepare(weight, row, inputs(weights, which) + token * kernels->input_bytes(weight));
            if (weight.rank)
                kernels->dots(weight.low_kind, weight.low_a, row, weight.rank, weight.in, low(which) + token * work.most_rank);
        }
    };
    // a token's states behind a norm, if there is one
    auto normed = [&](const Norm &norm, int token) -> const float * {
        if (!norm.scale) return state(token);
        float *row = row_of_thread(size);
        kernels->norm(norm, state(token), size, row);
        return row;
    };
    auto add_row = [&](const float *row, int token) {
        float *to = state(token);
        for (int i = 0; i < size; i++) to[i] += m.residual_scale * row[i];
    };
    // a block of outputs goes to the states, or waits in the branch
    auto add_to = [&](bool waits) {
        return [&work, &m, tokens, size, waits](int first, int outputs, const float *y) {
            for (int t = 0; t < tokens; t++) {
                float *row = (waits ? work.branch : work.states) + int64_t(t) * size + first;
                if (waits) std::memcpy(row, y + t * kBlock, 4 * outputs);
                else for (int o = 0; o < outputs; o++) row[o] += m.residual_scale * y[t * kBlock + o];
            }
        };
    };
    auto add_branch = [&](const Norm &norm, int token) {
        if (norm.scale) kernels->norm(norm, branch(token), size, branch(token));
        add_row(branch(token), token);
    };
    // what the feed-forward part of a layer left behind
    auto add_mlp = [&](const Layer &layer, int token) {
        if (const Experts *experts = layer.experts) {
            float *sum = branch(token);
            std::memset(sum, 0, 4 * size);
            for (int i = 0; i < experts->chosen; i++) {
                const int64_t at = int64_t(token) * work.most_chosen + i;
                const float *row = work.branch + (tokens + int64_t(work.places[at])) * size, share = work.shares[at];
                for (int j = 0; j < size; j++) sum[j] += share * row[j];
            }
        }
        if (layer.experts || layer.after_mlp.scale) add_branch(layer.after_mlp, token);
    };
    // a block of an expert's rows: `done(expert, first row, rows)`
    auto of_experts = [&](int blocks, auto done) {
        return pool->share(part++, number, work.slots * blocks, [&, blocks](int task) {
            const int slot = task / blocks, expert = work.used[2 * slot], first = work.used[2 * slot + 1];
            if (expert >= 0) done(expert, task % blocks, first, work.used[2 * slot + 3] - first);
        });
    };
    const int64_t row_bytes = int64_t(size) * bytes_of(m.state_kind);
    const Mixing &mixing = m.mixing;
    const int parts = mixing.rows ? columns_of(mixing) / kColumns : 0, walks = heads_of(mixing) * parts;  // of a text
    if (m.recurrences && !pool->share(part++, number, p.texts * m.layers, [&](int task) {
            const Recurrence *layer = m.of_layers[task % m.layers].recurrence;
            if (!layer) return;
            move_window(work, *layer, task / m.layers);
            for (int of = 0; of < walks && !tokens; of++) walk(work, *layer, task / m.layers, of / parts, of % parts);
        }))
        return;
    if (!tokens) return;
    if (!each([&](int token) {
            float *row = state(token);
            embed(m.embedding_kind, m.embedding, m.embedding_smooth, p.ids[token], size, row);
            if (m.embedding_scale != 1.0f)
                for (int i = 0; i < size; i++) row[i] *= m.embedding_scale;
            if (m.positions)
                for (int i = 0; i < size; i++) row[i] += m.positions[int64_t(work.tokens[token].position) * size + i];
        }))
        return;
    auto keep = [&](int layer, int token) {  // what enters a layer, or behind the last one the final norm
        for (int i = 0; i < p.kept; i++)
            if (p.kept_layers[i] == layer)
                kernels->store(m.state_kind, state(token), size,
                               static_cast<char *>(p.kept_states) + (int64_t(token) * p.kept + i) * row_bytes);
    };
    for (int index = 0; index < m.layers; index++) {
        const Outline outline{outlines[index].load(std::memory_order_acquire)};
        if (outline.number() != number) return;  // the job is over
        const Layer &now = m.of_layers[index];  // which only tasks look at
        const bool goes_on =
            each([&](int token) {
                if (index) add_mlp(m.of_layers[index - 1], token);
                keep(index, token);
                if (outline.qkv_blocks()) prepare(now.qkv, kMostProducts, normed(now.norm, token), token);
            }) &&
            (!outline.qkv_blocks() || (  // neither attention nor a recurrence
            pool->share(part++, number, outline.qkv_blocks(), [&](int block) {
                int which = 0, first = 0;
                for (; block >= blocks_of(now.qkv[which].out); which++) {
                    block -= blocks_of(now.qkv[which].out);
                    first += now.qkv[which].out;
                }
                float *y = outputs_of_thread(int64_t(tokens) * kBlock);
                const int outputs = multiply_block(now.qkv[which], block, inputs(now.qkv, which), tokens, y, low(which), work.most_rank);
                for (int t = 0; t < tokens; t++)
                    std::memcpy(work.qkv + t * work.width + first + block * kBlock, y + t * kBlock, 4 * outputs);
            }) &&
            (!outline.is_recurrent() || (
            (mixing.kind != kShortConvolution || each([&](int token) { open_gates(work, *now.recurrence, token); })) &&
            pool->share(part++, number, tokens * mixing.groups,
                        [&](int task) { convolve_group(work, *now.recurrence, task / mixing.groups, task % mixing.groups); }) &&
            pool->share(part++, number, p.texts * walks,
                        [&](int task) { walk(work, *now.recurrence, task / walks, task % walks / parts, task % parts); }) &&
            each([&](int token) {
                float *row = row_of_thread(now.recurrence->out.in);
                finish(work, *now.recurrence, token, row);
                prepare(&now.recurrence->out, 1, row, token);
            }) &&
            multiply(part++, number, size, [&]() -> const Weight & { return now.recurrence->out; }, work.inputs, tokens,
                     add_to(outline.attention_waits()), work.low, work.most_rank))) &&
            (!outline.attends() || (
            each([&](int token) { turn_and_store(work, now, index, token); }) &&
            pool->share(part++, number, work.num_groups * m.groups * work.head_parts,
                        [&](int task) {
                            const int of = task / work.head_parts / m.groups, heads = m.heads / m.groups / work.head_parts;
                            attend(work, now, index, work.groups[of], work.groups[of + 1] - work.groups[of],
                                   task / work.head_parts % m.groups, task % work.head_parts * heads, heads);
                        }) &&
            each([&](int token) {
                float *row = work.attended + int64_t(token) * joined;
                if (m.has_gates) close_gates(work, token, row);
                prepare(&now.out, 1, row, token);
            }) &&
            multiply(part++, number, size, [&]() -> const Weight & { return now.out; }, work.inputs, tokens,
                     add_to(outline.attention_waits()), work.low, work.most_rank))))) &&
            (!outline.inner_blocks() || (  // no feed-forward part
            each([&](int token) {
                if (outline.attention_waits() && !m.is_parallel) add_branch(now.after_attention, token);
                const float *row = normed(m.is_parallel && !now.middle.scale ? now.norm : now.middle, token);
                if (outline.has_experts()) {
                    choose_experts(work, *now.experts, row, token);
                    std::memcpy(work.inner + int64_t(token) * size, row, 4 * size);  // until the rows have an order
                } else {
                    prepare(now.gate_up, 2, row, token);
                }
                if (m.is_parallel) add_branch(now.after_attention, token);
            }) &&
            (outline.has_experts()
                 ? pool->share(part++, number, 1, [&](int) { order_rows(work, *now.experts); }) &&
                       each([&](int token) {
                           for (int64_t at = int64_t(token) * work.most_chosen, end = at + now.experts->chosen; at < end; at++) {
                               const Weight &gate = now.experts->weights[3 * work.chosen[at]];
                               kernels->prepare(gate, work.inner + int64_t(token) * size,
                                                work.inputs + row_at(*now.experts, 0, work.places[at], tokens));
                           }
                       }) &&
                       of_experts(outline.inner_blocks(), [&](int expert, int block, int first, int rows) {
                           const Weight *weights = now.experts->weights + 3 * expert;
                           if (block >= blocks_of(weights[0].out)) return;  // of another expert
                           const char *rows_of = work.inputs + row_at(*now.experts, 0, first, tokens);
                           const int64_t inner = inner_of(*now.experts);
                           float *gate = outputs_of_thread(int64_t(2 * rows) * kBlock), *up = gate + int64_t(rows) * kBlock;
                           const int outputs = multiply_block(weights[0], block, rows_of, rows, gate);
                           if (weights[1].out) multiply_block(weights[1], block, rows_of, rows, up);
                           else up = nullptr;
                           for (int r = 0; r < rows; r++)
                               kernels->gate(m.gate, gate + r * kBlock, up ? up + r * kBlock : nullptr, outputs,
                                             work.inner + (first + r) * inner + block * kBlock);
                       }) &&
                       each([&](int token) {
                           for (int64_t at = int64_t(token) * work.most_chosen, end = at + now.experts->chosen; at < end; at++) {
                               const Weight &down = now.experts->weights[3 * work.chosen[at] + 2];
                               const int64_t row = work.places[at];
                               kernels->prepare(down, work.inner + row * inner_of(*now.experts),
                                                work.inputs + row_at(*now.experts, 2, row, tokens));
                           }
                       }) &&
                       of_experts(blocks_of(size), [&](int expert, int block, int first, int rows) {
                           const Weight &down = now.experts->weights[3 * expert + 2];
                           float *y = outputs_of_thread(int64_t(rows) * kBlock);
                           const int outputs = multiply_block(down, block, work.inputs + row_at(*now.experts, 2, first, tokens), rows, y);
                           for (int r = 0; r < rows; r++)
                               std::memcpy(work.branch + (tokens + int64_t(first + r)) * size + block * kBlock, y + r * kBlock, 4 * outputs);
                       })
                 : pool->share(part++, number, outline.inner_blocks(), [&](int block) {
                       float *gate = outputs_of_thread(int64_t(2 * tokens) * kBlock), *up = gate + int64_t(tokens) * kBlock;
                       const Weight *weights = now.gate_up;
                       const int inner = weights[0].out;
                       const int outputs = multiply_block(weights[0], block, work.inputs, tokens, gate, low(0), work.most_rank);
                       if (weights[1].out) multiply_block(weights[1], block, inputs(weights, 1), tokens, up, low(1), work.most_rank);
                       else up = nullptr;
                       for (int t = 0; t < tokens; t++)
                           kernels->gate(m.gate, gate + t * kBlock, up ? up + t * kBlock : nullptr, outputs,
                                         work.inner + int64_t(t) * inner + block * kBlock);
                   }) &&
                       each([&](int token) { prepare(&now.down, 1, work.inner + int64_t(token) * now.down.in, token); }) &&
                       multiply(part++, number, size, [&]() -> const Weight & { return now.down; }, work.inputs, tokens,
                                add_to(outline.mlp_waits()), work.low, work.most_rank))));
        if (!goes_on) return;
    }
    each([&](int token) {
        float *row = state(token);
        add_mlp(m.of_layers[m.layers - 1], token);
        keep(m.layers, token);
        kernels->norm(m.final, row, size, row);
        kernels->store(m.state_kind, row, size, static_cast<char *>(p.states) + token * row_bytes);
    });
}

struct Alone {
    Weight weight;
    const void *x;
    void *y;
    char *inputs;
    int32_t x_kind, rows;
};
static_assert(sizeof(Alone) <= sizeof(Job::words), "a job holds it");

// Row r of x as products with the weight read it.
void prepare_row(const Weight &w, const void *x, int kind, int r, char *inputs) {
    float *row = row_of_thread(w.in);
    kernels->load(kind, static_cast<const char *>(x) + int64_t(r) * w.in * bytes_of(kind), w.in, row);
    kernels->prepare(w, row, inputs + r * kernels->input_bytes(w));
}

void product_of(const Job &job, uint32_t number) {
    Alone a;
    std::memcpy(&a, job.words, sizeof a);
    const Weight &w = a.weight;
    const int bytes = a.x_kind == kFloat32 ? 4 : 2;
    pool->share(0, number, a.rows, [&](int r) { prepare_row(w, a.x, a.x_kind, r, a.inputs); }) && multiply(1, number, w.out, [&]() -> const Weight & { return w; }, a.inputs, a.rows, [&](int first, int outputs, const float *y) {
        for (int r = 0; r < a.rows; r++)
            kernels->store(a.x_kind, y + r * kBlock, outputs, static_cast<char *>(a.y) + (int64_t(r) * w.out + first) * bytes);
    });
}

struct Top {
    const char *x;
    float *values, *totals;
    int64_t *places;
    int64_t row_bytes;
    float divisor;
    int32_t kind, rows, size, count;
};
static_assert(sizeof(Top) <= sizeof(Job::words), "a job holds it");

void top_of(const Job &job, uint32_t number) {
    Top t;
    std::memcpy(&t, job.words, sizeof t);
    pool->share(0, number, t.rows, [&](int64_t r) {
        const float total = kernels->top(t.kind, t.x + r * t.row_bytes, t.size, t.count, t.divisor, t.totals,
                                         t.values + r * t.count, t.places + r * t.count);
        if (t.totals) t.totals[r] = total;
    });
}

// The largest outputs alone: of each block, and then of all.
struct Best {
    Weight weight;
    const void *x;
    char *inputs;
    float *values;         // (blocks, rows)
    int64_t *of_blocks, *places;  // (blocks, rows), (rows,)
    float scale;
    int32_t x_kind, rows;
};
static_assert(sizeof(Best) <= sizeof(Job::words), "a job holds it");

void best_of(const Job &job, uint32_t number) {
    Best b;
    std::memcpy(&b, job.words, sizeof b);
    const Weight &w = b.weight;
    pool->share(0, number, b.rows, [&](int r) { prepare_row(w, b.x, b.x_kind, r, b.inputs); }) &&
        multiply(1, number, w.out, [&]() -> const Weight & { return w; }, b.inputs, b.rows, [&](int first, int outputs, float *y) {
            for (int r = 0; r < b.rows; r++) {
                float *row = y + r * kBlock;
                if (b.scale != 1.0f)
                    for (int o = 0; o < outputs; o++) row[o] *= b.scale;
                if (b.x_kind != kFloat32) {  // as they would be stored
                    uint16_t stored[kBlock];
                    kernels->store(b.x_kind, row, outputs, stored);
                    kernels->load(b.x_kind, stored, outputs, row);
                }
                const int64_t at = int64_t(first / kBlock) * b.rows + r;
                kernels->top(kFloat32, row, outputs, 1, 1.0f, false, b.values + at, b.of_blocks + at);
                b.of_blocks[at] += first;
            }
        }) &&
        pool->share(2, number, b.rows, [&](int r) {
            int64_t best = r;
            for (int64_t at = r, end = int64_t(blocks_of(w.out)) * b.rows; at < end; at += b.rows)
                if (b.values[at] > b.values[best]) best = at;
            b.places[r] = b.of_blocks[best];
        });
}

// --- packing ---

static_assert(sizeof(Packing) <= sizeof(Job::words), "a job holds it");

void packing_of(const Job &job, uint32_t number) {
    Packing p;
    std::memcpy(&p, job.words, sizeof p);
    pool->share(0, number, blocks_of(p.out), [&](int block) { kernels->pack(p, block); });
}

// --- drafting ---

}  // namespace

// A layer of a head: x + SiLU(W x + b), or V x + c + SiLU(W x + b).
struct HeadLayer {
    Weight weight, base;
    int32_t has_base;
};

// A depth of a head: its layers on the state, its lm_head, and the tree that grows.
struct Depth {
    int32_t first_layer, layers;
    float divisor;        // of the logits
    int32_t width, beam;  // children of each of so many of the most probable nodes; beam 0: of all
    Weight lm_head;
};

constexpr int kMostDepths = 16, kMostHeadLayers = 64;

// Grows candidates of a head whose depths are layers on one state: the last hidden state and, if it reads the path, the
// embeddings of the path's tokens behind it.
struct Growth {
    int32_t rows, size, num_depths, reads_path, embedding_kind;
    int32_t nodes;      // of the tree: what cannot be in it has no children; 0: everything has
    float likely;       // least probability of the nodes that get children, of all together
    float embedding_scale;
    const void *embedding;       // (vocabulary, size); of int8 as a weight that is packed
    const float *embedding_smooth;  // (size,) of int8, or null
    const int64_t *target_ids;   // (draft vocabulary,), or null
    const int64_t *roots;        // (rows,)
    const float *states;         // (rows, size)
    int64_t *tokens, *parents;   // (rows, capacity): the candidates, the root first
    float *log_probs;            // the same: of the whole path
    int32_t capacity;
    const HeadLayer *head_layers;
    const Depth *depths;
};

namespace {

// Of the growth at hand. It never goes, because a late thread may look at it.
struct Growing {
    std::atomic<uint32_t> number{0};  // of its job; it changes before anything else does
    Growth growth;
    HeadLayer layers[kMostHeadLayers];
    Depth depths[kMostDepths];
    // Nodes of each row that get children, for each depth; 0: it is over. A slow thread may read them late, so each is
    // written once.
    int32_t widths[kMostDepths + 1];
    int32_t count;  // candidates of each row so far
    std::vector<float> states, next_states, features, next_features, logits, values, totals, scores;
    std::vector<int64_t> places;
    std::vector<int32_t> nodes, above;  // (rows, width): among the candidates; among the nodes of the depth before
};
Growing &growing = *new Growing();

float log_prob(float value, float total) {
    const float log_prob = std::min(value - std::max(total, -3.4028234663852886e38f), 0.0f);
    return log_prob == log_prob ? log_prob : -INFINITY;  // NaN: of a damaged head
}

// Numbers of the state of a node.
int state_size(const Growth &w, int depth) { return w.reads_path ? (2 + depth) * w.size : w.size; }

void embed_scaled(const Growth &w, int64_t token, float *out) {
    embed(w.embedding_kind, w.embedding, w.embedding_smooth, token, w.size, out);
    for (int i = 0; i < w.size; i++) out[i] *= w.embedding_scale;
}

// For the products of a depth.
void make_room(Growing &g, int depth) {
    const Growth &w = g.growth;
    const Depth &level = g.depths[depth];
    const int64_t rows = w.reads_path ? int64_t(w.rows) * g.widths[depth] : w.rows;
    int64_t widest = kernels->input_bytes(level.lm_head), features = 0;
    for (int i = level.first_layer; i < level.first_layer + level.layers; i++) {
        const HeadLayer &layer = g.layers[i];
        widest = std::max(widest, kernels->input_bytes(layer.weight) + (layer.has_base ? kernels->input_bytes(layer.base) : 0));
        features = std::max<int64_t>(features, layer.weight.out);
    }
    room(buffers.inputs, widest * rows);
    for (auto *buffer : {&g.features, &g.next_features}) room(*buffer, features * rows);
    room(g.logits, rows * level.lm_head.out);
    room(g.values, rows * level.width);
    room(g.places, rows * level.width);
    room(g.totals, rows);
}

// The nodes that get children, after the candidates of a depth have been found.
void choose(Growing &g, int depth) {
    const Growth &w = g.growth;
    const int width = g.widths[depth], top = g.depths[depth].width, found = width * top, old = g.count, count = old + found;
    const bool is_last = depth + 1 == w.num_depths;
    const int beam = is_last ? 0 : g.depths[depth + 1].beam, most = beam ? std::min(beam, found) : found;
    std::vector<int32_t> order(found), nodes(w.rows * most), above(w.rows * most);
    std::vector<float> scores(w.rows * most), all;
    float reach = 0.0f;
    int useful = w.nodes ? 0 : most;
    for (int row = 0; row < w.rows; row++) {
        int64_t *tokens = w.tokens + int64_t(row) * w.capacity, *parents = w.parents + int64_t(row) * w.capacity;
        float *log_probs = w.log_probs + int64_t(row) * w.capacity;
        for (int node = 0; node < width; node++)
            for (int rank = 0; rank < top; rank++) {
                const int from = w.reads_path ? row * width + node : row, at = old + node * top + rank;
                const int64_t place = g.places[int64_t(from) * top + rank];
                tokens[at] = w.target_ids ? w.target_ids[place] : place;
                parents[at] = g.nodes[row * width + node];
                log_probs[at] = g.scores[row * width + node] + log_prob(g.values[int64_t(from) * top + rank], g.totals[from]);
            }
        if (is_last) continue;
        for (int i = 0; i < found; i++) order[i] = i;
        if (w.nodes || most < found)
            std::stable_sort(order.begin(), order.end(),
                             [&](int a, int b) { return log_probs[old + a] > log_probs[old + b]; });
        for (int i = 0; i < most; i++) {
            nodes[row * most + i] = old + order[i];
            above[row * most + i] = order[i] / top;
            scores[row * most + i] = log_probs[old + order[i]];
        }
        if (!w.nodes) continue;
        float last = -INFINITY;  // the least likely node of the tree so far
        bool is_full = count >= w.nodes;
        if (is_full) {
            all.assign(log_probs, log_probs + count);
            std::nth_element(all.begin(), all.begin() + (w.nodes - 1), all.end(), std::greater<float>());
            last = all[w.nodes - 1];
        }
        int here = 0;
        for (; here < most && (!is_full || scores[row * most + here] > last); here++) reach += std::exp(scores[row * most + here]);
        useful = std::max(useful, here);
    }
    g.count = count;
    if (w.nodes && reach < w.likely) useful = 0;
    if (is_last) useful = 0;
    g.nodes.resize(w.rows * useful);
    g.above.resize(w.rows * useful);
    g.scores.resize(w.rows * useful);
    for (int row = 0; row < w.rows; row++)
        for (int i = 0; i < useful; i++) {
            g.nodes[row * useful + i] = nodes[row * most + i];
            g.above[row * useful + i] = above[row * most + i];
            g.scores[row * useful + i] = scores[row * most + i];
        }
    const int64_t rows = int64_t(w.rows) * useful;
    if (w.reads_path) g.next_states.resize(rows * state_size(w, depth + 1));
    g.widths[depth + 1] = useful;
}

void grow_of(const Job &, uint32_t number) {
    Growing &g = growing;
    int part = 0;
    auto each = [&](int tasks, auto task) { return pool->share(part++, number, tasks, task); };
    // what was read outside of a task may be the next job's: then this one is over
    auto is_over = [&] {
        std::atomic_thread_fence(std::memory_order_acquire);
        return g.number.load(std::memory_order_relaxed) != number;
    };
    for (int depth = 0;; depth++) {
        if (depth >= g.growth.num_depths || depth >= kMostDepths) return;
        const Depth &level = g.depths[depth];
        const int rows = g.growth.reads_path ? g.growth.rows * g.widths[depth] : g.growth.rows, count = level.layers;
        int in = state_size(g.growth, depth);
        if (is_over()) return;
        // the state goes through the layers, and the lm_head reads what comes out
        for (int i = 0; i <= count; i++) {
            const bool is_head = i == count;
            const HeadLayer *layer = is_head ? nullptr : &g.layers[level.first_layer + i];
            const Weight &weight = is_head ? level.lm_head : layer->weight;
            const Weight *base = !is_head && layer->has_base ? &layer->base : nullptr;
            const int out = weight.out, from = i;
            const int64_t bytes = kernels->input_bytes(weight);
            if (is_over()) return;
            char *prepared = buffers.inputs.data(), *of_base = base && !reads_alike(weight, *base) ? prepared + rows * bytes : prepared;
            auto input = [&g, from, in](int row) {
                return (from ? (from % 2 ? g.features : g.next_features) : g.states).data() + int64_t(row) * in;
            };
            if (!each(rows, [&](int row) {
                    kernels->prepare(weight, input(row), prepared + row * bytes);
                    if (of_base != prepared) kernels->prepare(*base, input(row), of_base + row * kernels->input_bytes(*base));
                }) ||
                !each(blocks_of(out), [&](int block) {
                    float *y = outputs_of_thread(int64_t(2 * rows) * kBlock), *bases = y + int64_t(rows) * kBlock;
                    const int outputs = multiply_block(weight, block, prepared, rows, y), first = block * kBlock;
                    if (base) multiply_block(*base, block, of_base, rows, bases);
                    float *into = (is_head ? g.logits : from % 2 ? g.next_features : g.features).data();
                    for (int row = 0; row < rows; row++) {
                        float *to = into + int64_t(row) * out + first;
                        if (is_head) std::memcpy(to, y + row * kBlock, 4 * outputs);
                        else kernels->add_silu(base ? bases + row * kBlock : input(row) + first, y + row * kBlock, outputs, to);
                    }
                }))
                return;
            in = out;
        }
        if (!each(rows, [&](int row) {
                g.totals[row] = kernels->top(kFloat32, g.logits.data() + int64_t(row) * in, in, level.width, level.divisor, true,
                                             g.values.data() + int64_t(row) * level.width,
                                             g.places.data() + int64_t(row) * level.width);
            }) ||
            !each(1, [&](int) { choose(g, depth); }))
            return;
        const int width = g.widths[depth + 1];
        if (!width) return;
        if (!g.growth.reads_path) continue;
        const int old = state_size(g.growth, depth), whole = old + g.growth.size, nodes = g.growth.rows * width;
        if (is_over()) return;
        if (!each(nodes, [&](int node) {
                const Growth &w = g.growth;
                const int row = node / width, before = g.widths[depth];
                float *state = g.next_states.data() + int64_t(node) * whole;
                std::memcpy(state, g.states.data() + (int64_t(row) * before + g.above[node]) * old, 4 * old);
                embed_scaled(w, w.tokens[int64_t(row) * w.capacity + g.nodes[node]], state + old);
            }) ||
            !each(1, [&](int) {
                g.states.swap(g.next_states);
                make_room(g, depth + 1);
            }))
            return;
    }
}

template <class T>
Job job_of(void (*work)(const Job &, uint32_t), const T &what) {
    Job job = {};
    job.work = work;
    std::memcpy(job.words, &what, sizeof what);
    return job;
}

}  // namespace
}  // namespace draftheads

using namespace draftheads;

extern "C" {

// Name, offset and size of each field of the structures: a library of another version is not used.
const char *draftheads_layout() {
#define FIELD(structure, name) {#structure "." #name, offsetof(structure, name), sizeof(structure::name)}
    static const struct {
        const char *name;
        size_t offset, size;
    } fields[] = {
        FIELD(Weight, kind), FIELD(Weight, inputs), FIELD(Weight, out), FIELD(Weight, in), FIELD(Weight, packed),
        FIELD(Weight, bias), FIELD(Weight, smooth), FIELD(Weight, low_a), FIELD(Weight, low_b), FIELD(Weight, scales), FIELD(Weight, rank),
        FIELD(Weight, low_kind), FIELD(Norm, scale), FIELD(Norm, shift), FIELD(Norm, epsilon), FIELD(Norm, is_centred),
        FIELD(Gate, act), FIELD(Gate, alpha), FIELD(Gate, limit), FIELD(Experts, weights), FIELD(Experts, router),
        FIELD(Experts, router_bias), FIELD(Experts, choice_bias), FIELD(Experts, shared_gate), FIELD(Experts, count), FIELD(Experts, chosen), FIELD(Experts, share_of_all),
        FIELD(Experts, is_shared), FIELD(Experts, are_sigmoids), FIELD(Experts, added), FIELD(Experts, scaling), FIELD(Place, first), FIELD(Place, step), FIELD(Recurrence, out), FIELD(Recurrence, taps), FIELD(Recurrence, tap_bias),
        FIELD(Recurrence, decay), FIELD(Recurrence, step_bias), FIELD(Recurrence, skip), FIELD(Recurrence, norm),
        FIELD(Recurrence, places), FIELD(Recurrence, place), FIELD(Recurrence, unused), FIELD(Layer, qkv), FIELD(Layer, out), FIELD(Layer, gate_up), FIELD(Layer, down),
        FIELD(Layer, norm), FIELD(Layer, after_attention), FIELD(Layer, middle), FIELD(Layer, after_mlp),
        FIELD(Layer, query_norm), FIELD(Layer, key_norm), FIELD(Layer, sinks), FIELD(Layer, experts), FIELD(Layer, window),
        FIELD(Layer, turns), FIELD(Layer, recurrence), FIELD(Layer, cache), FIELD(Layer, unused), FIELD(Mixing, kind),
        FIELD(Mixing, groups), FIELD(Mixing, heads), FIELD(Mixing, rows), FIELD(Mixing, values), FIELD(Mixing, taps),
        FIELD(Mixing, normed), FIELD(Mixing, gates_first), FIELD(Mixing, share_factor), FIELD(Mixing, least_step),
        FIELD(Mixing, most_step), FIELD(Mixing, unused), FIELD(Model, size), FIELD(Model, heads), FIELD(Model, groups), FIELD(Model, head_size),
        FIELD(Model, turned), FIELD(Model, key_first), FIELD(Model, value_first), FIELD(Model, query_step),
        FIELD(Model, key_step), FIELD(Model, layers), FIELD(Model, cache_kind), FIELD(Model, state_kind),
        FIELD(Model, embedding_kind), FIELD(Model, vocab), FIELD(Model, is_parallel), FIELD(Model, turns_neighbours),
        FIELD(Model, norms_whole), FIELD(Model, has_gates), FIELD(Model, caches), FIELD(Model, scaling), FIELD(Model, cap), FIELD(Model, embedding_scale),
        FIELD(Model, residual_scale), FIELD(Model, gate), FIELD(Model, final), FIELD(Model, of_layers), FIELD(Model, embedding),
        FIELD(Model, embedding_smooth), FIELD(Model, positions), FIELD(Model, num_positions), FIELD(Model, recurrences),
        FIELD(Model, mixing),
        FIELD(Pass, tokens), FIELD(Pass, texts), FIELD(Pass, words), FIELD(Pass, kept), FIELD(Pass, ids), FIELD(Pass, memory),
        FIELD(Pass, slots), FIELD(Pass, lengths), FIELD(Pass, counts), FIELD(Pass, depths), FIELD(Pass, ancestors),
        FIELD(Pass, cos), FIELD(Pass, sin), FIELD(Pass, num_turns), FIELD(Pass, of_tokens), FIELD(Pass, last_position),
        FIELD(Pass, drafted), FIELD(Pass, kept_layers), FIELD(Pass, kept_states), FIELD(Pass, states),
        FIELD(Pass, states_of_texts), FIELD(Pass, records), FIELD(Pass, old_records), FIELD(Pass, record_slots),
        FIELD(Pass, old_slots), FIELD(Pass, accepted_first), FIELD(Pass, accepted),
        FIELD(HeadLayer, weight), FIELD(HeadLayer, base), FIELD(HeadLayer, has_base), FIELD(Depth, first_layer),
        FIELD(Depth, layers), FIELD(Depth, divisor), FIELD(Depth, width), FIELD(Depth, beam), FIELD(Depth, lm_head),
        FIELD(Growth, rows), FIELD(Growth, size), FIELD(Growth, num_depths), FIELD(Growth, reads_path),
        FIELD(Growth, embedding_kind), FIELD(Growth, nodes), FIELD(Growth, likely), FIELD(Growth, embedding_scale),
        FIELD(Growth, embedding), FIELD(Growth, embedding_smooth), FIELD(Growth, target_ids), FIELD(Growth, roots),
        FIELD(Growth, states), FIELD(Growth, tokens), FIELD(Growth, parents), FIELD(Growth, log_probs),
        FIELD(Growth, capacity), FIELD(Growth, head_layers), FIELD(Growth, depths),
    };
#undef FIELD
    static const std::string text = [] {
        std::string all = "rounds int8\n";  // what else has changed
        for (const auto &field : fields)
            all += std::string(field.name) + " " + std::to_string(field.offset) + " " + std::to_string(field.size) + "\n";
        return all;
    }();
    return text.c_str();
}

// Makes a set of kernels the one in use, the fastest if none is named, and returns its name; null if this machine does
// not support it. "" changes nothing.
const char *draftheads_kernels(const char *wanted) {
    std::lock_guard<std::mutex> lock(turns);
    if (wanted && !*wanted) return kernels->name;
    for (const Kernels *set : kSets) {
        if (!supports(*set) || (wanted && std::strcmp(wanted, set->name))) continue;
        kernels = set;
        return set->name;
    }
    return nullptr;
}

void draftheads_threads(int threads) {
    std::lock_guard<std::mutex> lock(turns);
    pool->resize(std::max(1, threads));
}

// In the child of a fork, which has no threads but the one that called fork.
void draftheads_forked() {
    new (&turns) std::mutex();
    pool = new Pool();  // the old one waits for its threads when it goes, so it stays
}

// How many bytes a packed weight (out, in) has, with padding.
int64_t draftheads_packed_size(int kind, int out, int in) { return blocks_of(out) * block_bytes(kind, in); }

// Packs a weight (out, in), or unpacks it. int8 and int4 round fp32 numbers; `of_inputs` (in,) is, or null, what int8
// divides them by and what int4 weights errors by. Back, int8 gives its whole numbers, and int4 fp32.
void draftheads_pack(int kind, void *weight, const float *of_inputs, int out, int in, void *packed, int back) {
    std::lock_guard<std::mutex> lock(turns);
    pool->run(job_of(packing_of, Packing{static_cast<char *>(weight), of_inputs, static_cast<char *>(packed), kind, out, in, back}), 1);
}

void draftheads_multiply(const Weight *weight, const void *x, int x_kind, int rows, void *y) {
    std::lock_guard<std::mutex> lock(turns);
    char *inputs = room(buffers.inputs, kernels->input_bytes(*weight) * rows);
    pool->run(job_of(product_of, Alone{*weight, x, y, inputs, x_kind, rows}), 2);
}

// The first of the largest outputs * scale of each row of x (rows, in), (rows,), as they are in the type of x.
void draftheads_best_outputs(const Weight *weight, const void *x, int x_kind, int rows, float scale, int64_t *places) {
    std::lock_guard<std::mutex> lock(turns);
    const int64_t all = int64_t(blocks_of(weight->out)) * rows;
    const Best best{*weight, x, room(buffers.inputs, kernels->input_bytes(*weight) * rows), room(buffers.shares, all),
                    room(buffers.best, all), places, scale, x_kind, rows};
    pool->run(job_of(best_of, best), 3);
}

// The largest numbers x / divisor of each row of x (rows, size): values and places (rows, count), and the logarithm of the
// sum of e^(x / divisor), (rows,), unless it is null. At most `size` are asked for.
void draftheads_top(int kind, const void *x, int rows, int size, int count, float divisor, float *values, int64_t *places,
                    float *totals) {
    std::lock_guard<std::mutex> lock(turns);
    const int64_t bytes = int64_t(size) * bytes_of(kind);
    pool->run(job_of(top_of, Top{static_cast<const char *>(x), values, totals, places, bytes, divisor, kind, rows, size, count}), 1);
}

// The tree of the `count` candidates of highest priority of each row, the highest first and of equals the first. Takes
// (rows, candidates) and gives (rows, count): the candidates, their parents in the tree, depths, and whether they see
// each other (rows, count, count).
void draftheads_best(const float *priority, const int64_t *parents, int rows, int candidates, int count, int64_t *order,
                     int64_t *new_parents, int64_t *depths, bool *ancestors) {
    std::vector<int32_t> sorted(candidates), place(candidates);
    for (int row = 0; row < rows; row++) {
        const float *of_row = priority + int64_t(row) * candidates;
        for (int i = 0; i < candidates; i++) sorted[i] = i;
        std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return of_row[a] > of_row[b]; });
        for (int i = 0; i < candidates; i++) place[sorted[i]] = i;
        for (int node = 0; node < count; node++) {
            const int64_t at = int64_t(row) * count + node;
            const int parent = place[parents[int64_t(row) * candidates + sorted[node]]];
            order[at] = sorted[node];
            new_parents[at] = parent;
            bool *sees = ancestors + at * count;
            if (parent < node) std::memcpy(sees, ancestors + (int64_t(row) * count + parent) * count, count);
            else std::memset(sees, 0, count);
            sees[node] = true;
            depths[at] = parent < node ? depths[int64_t(row) * count + parent] + 1 : 0;
        }
    }
}

// Grows candidates; returns their number for each row.
int draftheads_grow(const Growth *growth) {
    std::lock_guard<std::mutex> lock(turns);
    Growing &g = growing;
    const Growth &w = *growth;
    if (w.num_depths < 1 || w.num_depths > kMostDepths) return 0;
    g.number.store(pool->next(), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    g.growth = w;
    int layers = 0;
    for (int i = 0; i < w.num_depths; i++) {
        g.depths[i] = w.depths[i];
        layers = std::max(layers, w.depths[i].first_layer + w.depths[i].layers);
    }
    if (layers > kMostHeadLayers) return 0;
    std::copy(w.head_layers, w.head_layers + layers, g.layers);
    g.widths[0] = g.count = 1;
    const int size = state_size(w, 0);
    g.states.assign(int64_t(w.rows) * size, 0.0f);
    g.nodes.assign(w.rows, 0);
    g.scores.assign(w.rows, 0.0f);
    for (int row = 0; row < w.rows; row++) {
        float *state = g.states.data() + int64_t(row) * size;
        std::memcpy(state, w.states + int64_t(row) * w.size, 4 * w.size);
        if (w.reads_path) embed_scaled(w, w.roots[row], state + w.size);
        w.tokens[int64_t(row) * w.capacity] = w.roots[row];
        w.parents[int64_t(row) * w.capacity] = 0;
        w.log_probs[int64_t(row) * w.capacity] = 0.0f;
    }
    for (int depth = 0; depth < (w.reads_path ? 1 : w.num_depths); depth++) make_room(g, depth);
    Job job = {};
    job.work = grow_of;
    pool->run(job, w.num_depths * (2 * (layers + 1) + 4));
    return g.count;
}

// Numbers of a recurrent layer's states of a text, and of a node's record of it.
int64_t draftheads_states_size(const Model *model) { return states_size(model->mixing); }
int64_t draftheads_record_size(const Model *model) { return record_size(model->mixing); }

// Returns 0; or 1 if a token is not in the vocabulary, or 2 if a position is not in a table: then nothing is computed.
int draftheads_pass(const Model *model, const Pass *pass) {
    std::lock_guard<std::mutex> lock(turns);
    const Model &m = *model;
    const Pass &p = *pass;
    const int64_t count = p.tokens, joined = int64_t(m.heads) * m.head_size;
    const int per_group = m.heads / m.groups, together = std::max(1, kTogether / per_group);
    Token *tokens = room(buffers.tokens, count);
    int32_t *groups = room(buffers.groups, count + 1), *first_tokens = room(buffers.first_tokens, p.texts), num_groups = 0, token = 0;
    for (int text = 0; text < p.texts; text++) {
        const int32_t first = first_tokens[text] = token;
        for (; token < first + p.counts[text]; token++) {
            if (p.ids[token] < 0 || p.ids[token] >= m.vocab) return 1;
            const int32_t position = std::min(p.lengths[text] + p.depths[token], p.last_position);
            if (position < 0 || (m.turned && !p.of_tokens && position >= p.num_turns) || (m.positions && position >= m.num_positions)) return 2;
            tokens[token] = {text, first, p.lengths[text], position, -1, -1, -1};
            if (m.recurrences) join_family(p, tokens, token);
            if ((token - first) % together == 0) groups[num_groups++] = token;
        }
    }
    groups[num_groups] = token;
    // few tokens: each head is a task
    const int32_t head_parts = num_groups * m.groups < 4 * pool->size() ? per_group : 1;
    int64_t widest = 0, most_rank = 0, inner = 0, width = 0;
    int32_t slots = 0, most_chosen = 0, copies = 3;
    for (int layer = 0; layer < m.layers; layer++) {
        const Layer &l = m.of_layers[layer];
        const int inner_blocks = blocks_of(l.experts ? inner_of(*l.experts) : l.gate_up[0].out);
        int qkv_blocks = 0;
        int64_t outputs = 0;
        for (int which = 0; which < kMostProducts; which++) {
            const Weight &w = l.qkv[which];
            qkv_blocks += blocks_of(w.out);
            outputs += w.out;
            if (w.out && !reads_alike(l.qkv[0], w)) copies = std::max(copies, which + 1);
            if (w.out) widest = std::max(widest, kernels->input_bytes(w));
            most_rank = std::max<int64_t>(most_rank, w.rank);
        }
        width = std::max(width, outputs);
        if (qkv_blocks >= Outline::kMostBlocks || inner_blocks >= Outline::kMostBlocks) return 3;
        outlines[layer].store(Outline::of(pool->next(), qkv_blocks, inner_blocks,
                                          l.after_attention.scale || m.is_parallel, l.after_mlp.scale, l.experts, l.recurrence, l.out.out),
                              std::memory_order_release);
        for (const Weight *w : {&l.out, &l.gate_up[0], &l.gate_up[1], &l.down, l.recurrence ? &l.recurrence->out : &l.out}) {
            if (!w->out) continue;
            widest = std::max(widest, kernels->input_bytes(*w));
            most_rank = std::max<int64_t>(most_rank, w->rank);
        }
        inner = std::max<int64_t>(inner, l.gate_up[0].out);
        if (!l.experts) continue;
        const Experts &e = *l.experts;
        most_chosen = std::max(most_chosen, e.chosen);
        slots = std::max<int32_t>(slots, std::min<int64_t>(e.count + e.is_shared, count * e.chosen));
        // the rows of all experts fit where those of three weights do
        for (int which = 0; which < 3; which++)
            widest = std::max(widest, (row_at(e, which, e.chosen, 1) + 2) / 3);
        inner = std::max<int64_t>(inner, std::max(inner_of(e) * e.chosen, m.size));
    }
    const Work work{m, p, room(buffers.inputs, copies * widest * count), room(buffers.states, count * m.size),
                    room(buffers.branch, count * m.size * (1 + most_chosen)), room(buffers.qkv, count * width),
                    room(buffers.attended, count * joined), room(buffers.inner, count * inner),
                    room(buffers.low, kMostProducts * count * most_rank), room(buffers.mixed, m.recurrences ? count * Mixed::size(m.mixing) : 0),
                    widest, most_rank, width, tokens, first_tokens, groups, num_groups, head_parts,
                    room(buffers.chosen, count * most_chosen), room(buffers.places, count * most_chosen),
                    room(buffers.used, 2 * (slots + 1)), room(buffers.shares, count * most_chosen), slots, most_chosen};
    pool->run(job_of(pass_of, work), kPartsOfLayer * m.layers + 3);
    return 0;
}

}
