// Recurrent layers of a pass, a part of step.cpp: convolutions, states that follow the trees, and gates of outputs.
//
// A text keeps, of each recurrent layer, the last inputs of the convolution (taps - 1, channels) and the states (heads, parts,
// rows, kColumns), where a part are kColumns numbers of a head's value. Channels are in groups: queries and keys of a group, and
// the values of its heads. A pass over a tree changes none of this, and leaves a record of each node; the next one begins with
// the records of the nodes that were accepted. A pass over a text moves the states at once.

int columns_of(const Mixing &x) { return (x.values + kColumns - 1) / kColumns * kColumns; }
int heads_of(const Mixing &x) { return x.groups * x.heads; }
int group_channels(const Mixing &x) { return 2 * x.rows + x.heads * x.values; }
int channels_of(const Mixing &x) { return x.groups * group_channels(x); }
int64_t window_size(const Mixing &x) { return int64_t(x.taps - 1) * channels_of(x); }
int64_t states_size(const Mixing &x) { return window_size(x) + int64_t(heads_of(x)) * x.rows * columns_of(x); }
// Inputs of the convolution, keys of groups, what heads add, and their decays.
int64_t record_size(const Mixing &x) {
    return channels_of(x) + (x.rows ? int64_t(x.groups) * x.rows + int64_t(heads_of(x)) * (columns_of(x) + 1) : 0);
}

// What a token has between the parts of a layer: keys and queries of groups and their products, and of heads decays, shares,
// values, what they add, and outputs.
struct Mixed {
    float *keys, *queries, *key_queries, *decays, *shares, *values, *added, *out;

    Mixed(float *at, const Mixing &x) {
        const int64_t of_groups = int64_t(x.groups) * x.rows, heads = heads_of(x), of_heads = heads * columns_of(x);
        keys = at;
        queries = keys + of_groups;
        key_queries = queries + of_groups;
        decays = key_queries + x.groups;
        shares = decays + heads;
        values = shares + heads;
        added = values + of_heads;
        out = added + of_heads;
    }
    static int64_t size(const Mixing &x) {
        return int64_t(x.groups) * (2 * x.rows + 1) + int64_t(heads_of(x)) * (2 + 3 * columns_of(x));
    }
};

Mixed mixed_of(const Work &work, int token) {
    return {work.mixed + token * Mixed::size(work.model.mixing), work.model.mixing};
}

float *states_of(const Work &work, int text, const Recurrence &layer) {
    return work.pass.states_of_texts[text] + layer.place * states_size(work.model.mixing);
}

// The record of a node of this pass, or of a node that was accepted in the one before.
float *record_of(const Work &work, int text, const Recurrence &layer, int node) {
    return work.pass.records[text] + (int64_t(layer.place) * work.pass.record_slots[text] + node) * record_size(work.model.mixing);
}

const float *accepted(const Work &work, int text, const Recurrence &layer, int i) {
    const Pass &p = work.pass;
    const int node = p.accepted[p.accepted_first[text] + i];
    return p.old_records[text] + (int64_t(layer.place) * p.old_slots[text] + node) * record_size(work.model.mixing);
}

int num_accepted(const Work &work, int text) { return work.pass.accepted_first[text + 1] - work.pass.accepted_first[text]; }

// The window of a text moves behind its accepted nodes.
void move_window(const Work &work, const Recurrence &layer, int text) {
    const int64_t channels = channels_of(work.model.mixing);
    const int window = work.model.mixing.taps - 1, count = num_accepted(work, text);
    float *to = states_of(work, text, layer);
    for (int i = 0; i < window && count; i++) {
        const int from = i + count - window;  // below 0: of the window
        std::memcpy(to + i * channels, from < 0 ? to + (window + from) * channels : accepted(work, text, layer, from), 4 * channels);
    }
}

// The numbers of some neighbouring channels before a convolution: those of a token, or of the window at the way's beginning.
struct Segment {
    Place place;     // among the outputs of the layer's products
    int64_t channel; // among all of a window
};

const float *input_of(const Work &work, const float *window, int token, int back, int group, const Segment &segment) {
    for (; back && token >= 0; back--) token = work.tokens[token].parent;
    if (token >= 0) return work.qkv + token * work.width + segment.place.first + int64_t(group) * segment.place.step;
    return window + int64_t(work.model.mixing.taps - 2 - back) * channels_of(work.model.mixing) + segment.channel;
}

void convolve(const Work &work, const Recurrence &layer, int token, int group, const Segment &segment, int size, float *out) {
    const Mixing &x = work.model.mixing;
    const float *inputs[kMostTaps], *window = states_of(work, work.tokens[token].text, layer);
    for (int tap = 0; tap < x.taps; tap++) inputs[tap] = input_of(work, window, token, x.taps - 1 - tap, group, segment);
    kernels->convolve({inputs, layer.taps + segment.channel, layer.tap_bias ? layer.tap_bias + segment.channel : nullptr,
                       channels_of(x), x.taps, size, x.kind != kShortConvolution, out});
}

// Segments of a group: queries, keys, and the values of its heads.
Segment segment_of(const Mixing &x, const Recurrence &layer, int group, int which) {
    return {layer.places[which], int64_t(group) * group_channels(x) + which * x.rows};
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Queries, keys and values of a group of a token, and how its states change.
void convolve_group(const Work &work, const Recurrence &layer, int token, int group) {
    const Mixing &x = work.model.mixing;
    const Mixed mixed = mixed_of(work, token);
    if (x.kind == kShortConvolution) return convolve(work, layer, token, group, segment_of(x, layer, group, kValues), x.values, mixed.out);
    const float *row = work.qkv + token * work.width;
    float *query = mixed.queries + int64_t(group) * x.rows, *key = mixed.keys + int64_t(group) * x.rows;
    for (int which = 0; which < 2; which++) {
        float *to = which ? key : query, square;
        convolve(work, layer, token, group, segment_of(x, layer, group, which), x.rows, to);
        if (x.kind != kDeltaRule) continue;
        kernels->dots(kFloat32, to, to, 1, x.rows, &square);
        const float factor = 1.0f / std::sqrt(square + 1e-6f) * (which ? 1.0f : 1.0f / std::sqrt(float(x.rows)));
        for (int i = 0; i < x.rows; i++) to[i] *= factor;
    }
    kernels->dots(kFloat32, key, query, 1, x.rows, mixed.key_queries + group);
    const int columns = columns_of(x);
    for (int i = 0; i < x.heads; i++) {
        const int head = group * x.heads + i;
        Segment values = segment_of(x, layer, group, kValues);
        values.place.first += i * x.values;
        values.channel += int64_t(i) * x.values;
        float *to = mixed.values + int64_t(head) * columns;
        convolve(work, layer, token, group, values, x.values, to);
        std::fill(to + x.values, to + columns, 0.0f);
        auto number = [&](int which) {
            const Place &place = layer.places[which];
            return row[place.first + int64_t(group) * place.step + i];
        };
        const float step = std::min(std::max(softplus(number(kSteps) + layer.step_bias[head]), x.least_step), x.most_step);
        mixed.decays[head] = std::exp(layer.decay[head] * step);
        mixed.shares[head] = x.kind == kStateSpace ? step : x.share_factor / (1.0f + std::exp(-number(kShares)));
    }
}

// What a short convolution reads: values times their gates before it, which stand in the place of steps.
void open_gates(const Work &work, const Recurrence &layer, int token) {
    float *row = work.qkv + token * work.width, *values = row + layer.places[kValues].first;
    const float *gates = row + layer.places[kSteps].first;
    for (int i = 0; i < work.model.mixing.values; i++) values[i] *= gates[i];
}

// The walk of one part of a head's state over the nodes of a text. States of nodes are made where children need them: in
// the place of their parent's, except where that one still has other children.
struct Walk {
    const Work &work;
    const Recurrence &layer;
    int head, part, rows;
    std::deque<std::vector<float>> &scratch;

    Node node_of(int token) const {
        const Mixing &x = work.model.mixing;
        const Mixed mixed = mixed_of(work, token);
        const int group = head / x.heads;
        const int64_t key = int64_t(group) * rows, at = int64_t(head) * columns_of(x) + part * kColumns;
        return {mixed.keys + key, mixed.queries + key, mixed.values + at, mixed.added + at, mixed.out + at, mixed.decays[head],
                mixed.shares[head], mixed.key_queries[group], layer.skip ? layer.skip[head] : 0.0f, x.kind == kDeltaRule};
    }

    Change change_of(int token) const {
        const Node node = node_of(token);
        return {node.key, node.added, node.decay};
    }

    Change change_of(const float *record) const {
        const Mixing &x = work.model.mixing;
        const float *keys = record + channels_of(x), *added = keys + int64_t(x.groups) * rows;
        return {keys + int64_t(head / x.heads) * rows, added + int64_t(head) * columns_of(x) + part * kColumns,
                added[int64_t(heads_of(x)) * columns_of(x) + head]};
    }

    float *room_at(size_t level) const {
        while (scratch.size() <= level) scratch.emplace_back();
        return room(scratch[level], int64_t(rows) * kColumns);
    }

    // Nodes with the same parent, and all below them. Their states begin with `changes` of `from`, which go to `to`; this
    // is changed further if it is `owned`. Returns the last node of a chain.
    int below(int first, const float *from, const Change *changes, int count, float *to, int level, bool owned) const {
        Change change;
        for (;;) {
            int last = -1;
            for (int token = first; token >= 0; token = work.tokens[token].sibling) {
                const Node node = node_of(token);
                kernels->advance({count ? from : to, to, changes, count, rows, &node});
                count = 0;
                if (work.tokens[token].child >= 0) last = token;
            }
            if (last < 0) return first;
            for (int token = first; token != last; token = work.tokens[token].sibling) {
                if (work.tokens[token].child < 0) continue;
                change = change_of(token);
                below(work.tokens[token].child, to, &change, 1, room_at(level), level + 1, true);
            }
            from = to;
            if (!owned) to = room_at(level++);
            owned = true;
            change = change_of(last);
            changes = &change;
            count = 1;
            first = work.tokens[last].child;
        }
    }
};

void walk(const Work &work, const Recurrence &layer, int text, int head, int part) {
    const Mixing &x = work.model.mixing;
    const Pass &p = work.pass;
    static thread_local std::deque<std::vector<float>> scratch;
    static thread_local std::vector<Change> changes;
    const Walk walk{work, layer, head, part, x.rows, scratch};
    const int64_t size = int64_t(x.rows) * kColumns, parts = columns_of(x) / kColumns;
    float *state = states_of(work, text, layer) + window_size(x) + (head * parts + part) * size;
    changes.clear();
    for (int i = 0; i < num_accepted(work, text); i++) changes.push_back(walk.change_of(accepted(work, text, layer, i)));
    const int count = int(changes.size());
    if (!p.counts[text]) return kernels->advance({state, state, changes.data(), count, x.rows, nullptr});
    const int last = walk.below(work.first_tokens[text], state, changes.data(), count, state, 0, !p.ancestors);
    if (p.ancestors) return;
    const Change change = walk.change_of(last);
    kernels->advance({state, state, &change, 1, x.rows, nullptr});
}

// What the layer's last product reads of a token; then its record, or the window behind the last token of a text.
void finish(const Work &work, const Recurrence &layer, int token, float *out) {
    const Mixing &x = work.model.mixing;
    const Pass &p = work.pass;
    const Token &t = work.tokens[token];
    const Mixed mixed = mixed_of(work, token);
    const float *row = work.qkv + token * work.width;
    const int64_t columns = columns_of(x), channels = channels_of(x);
    auto close = [&] {
        for (int head = 0; head < heads_of(x); head++) {
            const Place &place = layer.places[kGates];
            const float *gate = row + place.first + int64_t(head / x.heads) * place.step + head % x.heads * x.values;
            float *of_head = out + head * x.values;
            if (x.kind != kShortConvolution) kernels->gate({kSilu, 0.0f, 0.0f}, gate, of_head, x.values, of_head);
            else for (int i = 0; i < x.values; i++) of_head[i] *= gate[i];
        }
    };
    for (int head = 0; head < heads_of(x); head++) std::memcpy(out + head * x.values, mixed.out + head * columns, 4 * x.values);
    if (x.gates_first) close();
    for (int at = 0; x.normed && at < heads_of(x) * x.values; at += x.normed)
        kernels->norm({layer.norm.scale + at, nullptr, layer.norm.epsilon, 0}, out + at, x.normed, out + at);
    if (!x.gates_first) close();
    auto copy_inputs = [&](int of, float *to) {
        for (int group = 0; group < x.groups; group++)
            for (int which = 0; which < 3; which++) {
                const int size = which == kValues ? x.heads * x.values : x.rows;
                std::memcpy(to, input_of(work, nullptr, of, 0, group, segment_of(x, layer, group, which)), 4 * size);
                to += size;
            }
    };
    if (p.ancestors) {
        float *record = record_of(work, t.text, layer, token - t.first);
        copy_inputs(token, record);
        if (!x.rows) return;
        record += channels;
        std::memcpy(record, mixed.keys, 4 * int64_t(x.groups) * x.rows);
        record += int64_t(x.groups) * x.rows;
        std::memcpy(record, mixed.added, 4 * heads_of(x) * columns);
        std::memcpy(record + heads_of(x) * columns, mixed.decays, 4 * heads_of(x));
    } else if (t.child < 0) {
        float *window = states_of(work, t.text, layer);
        const int count = token - t.first + 1;
        for (int i = 0; i < x.taps - 1; i++) {
            const int back = x.taps - 2 - i;  // tokens before the last one
            if (back < count) copy_inputs(token - back, window + i * channels);
            else std::memcpy(window + i * channels, window + (i + count) * channels, 4 * channels);
        }
    }
}

// A token's parent, which comes before it, and its place among the children.
void join_family(const Pass &p, Token *tokens, int token) {
    Token &t = tokens[token];
    const int node = token - t.first;
    int parent = node - 1;
    if (p.ancestors) {
        const uint64_t *bits = p.ancestors + int64_t(token) * p.words;
        while (parent >= 0 && !(bits[parent / 64] >> (parent % 64) & 1)) parent--;
    }
    if (parent >= 0) t.parent = t.first + parent;
    int *last = parent >= 0 ? &tokens[t.parent].child : &tokens[t.first].sibling;  // the first node is a child of the text
    if (token == t.first) return;
    while (*last >= 0) last = &tokens[*last].sibling;
    *last = token;
}
