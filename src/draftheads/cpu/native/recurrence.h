// Recurrences of a layer, a part of kernels.cpp: what it includes is compiled once for each set of instructions.
//
// A head's state has a row for each number of a key, and a column for each number of a value. Columns do not depend on each
// other, so kColumns of them are computed alone, from the first token to the last, and stay in the nearest cache.

// What a node's value adds to the state, and its output: (sums of the state times its key and its query) -> (added, output).
// Never inlined: so it is the same instructions for each node.
__attribute__((noinline)) void react(const Node &node, const Vec *of_key, const Vec *of_query) {
    for (int v = 0; v < kColumns / kLanes; v++) {
        const Vec value = load(node.value + v * kLanes);
        Vec left = value;
        if (node.is_corrected) add_product(left, all(-node.decay), of_key[v]);
        const Vec added = times(all(node.share), left);
        Vec out = times(all(node.decay), of_query[v]);
        add_product(out, all(node.key_query), added);
        add_product(out, all(node.skip), value);
        store(node.added + v * kLanes, added);
        store(node.out + v * kLanes, out);
    }
}

template <bool moves, bool reads>
void advance_by(const Advance &a) {
    constexpr int vecs = kColumns / kLanes;
    Vec of_key[vecs] = {}, of_query[vecs] = {};
    for (int row = 0; row < a.rows; row++) {
        Vec state[vecs];
        for (int v = 0; v < vecs; v++) state[v] = load(a.from + row * kColumns + v * kLanes);
        if constexpr (moves) {
            for (const Change *change = a.changes; change < a.changes + a.count; change++) {
                const Vec decay = all(change->decay), key = all(change->key[row]);
                for (int v = 0; v < vecs; v++) {
                    state[v] = times(decay, state[v]);
                    add_product(state[v], key, load(change->added + v * kLanes));
                }
            }
            for (int v = 0; v < vecs; v++) store(a.to + row * kColumns + v * kLanes, state[v]);
        }
        if constexpr (reads) {
            const Vec key = all(a.node->key[row]), query = all(a.node->query[row]);
            for (int v = 0; v < vecs; v++) {
                add_product(of_key[v], key, state[v]);
                add_product(of_query[v], query, state[v]);
            }
        }
    }
    if constexpr (reads) react(*a.node, of_key, of_query);
}

void advance(const Advance &a) {
    if (a.count) (a.node ? advance_by<true, true> : advance_by<true, false>)(a);
    else if (a.node) advance_by<false, true>(a);
}

// A causal convolution of neighbouring channels, the oldest input first, and SiLU of it.
void convolve(const Convolution &c) {
    for (int i = 0; i < c.size; i += kLanes) {
        const int count = c.size - i < kLanes ? c.size - i : kLanes;
        auto some = [&](const float *x) {
            return count == kLanes ? load(x + i) : load_some(kFloat32, reinterpret_cast<const char *>(x + i), count);
        };
        Vec sum = c.bias ? some(c.bias) : Vec{};
        for (int tap = 0; tap < c.taps; tap++) add_product(sum, some(c.inputs[tap]), some(c.weights + tap * c.stride));
        if (c.is_activated) sum = activated(kSilu, sum);
        if (count == kLanes) {
            store(c.out + i, sum);
        } else {
            float rest[kLanes];
            store(rest, sum);
            std::memcpy(c.out + i, rest, 4 * count);
        }
    }
}
