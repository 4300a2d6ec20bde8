// Update rules whose states take few bits: one pass decodes, updates and encodes a block.
//
// States are packed as `xmem/codec.py` says, in the element order of the contiguous parameter, or
// are float32 arrays of as many elements (bits 32). `xmem/optim_rules.py` is the definition in NumPy,
// computes the numbers below for each step, and has the sizes of states (`state_bytes`).
//
//   bits   first moment (momentum)            second moment
//   32     m                                  v
//   8      m, style "plain"                   sqrt(v), style "floor"
//   4      sign(m) sqrt(|m|), "plain"         v^(1/4), "floor"
//
// At 4 bits the rounding is laid out so that the mean of what comes back is m and v themselves.
// States begin as zeros: packed zeros are bytes of 0, so a zeroed buffer is a valid state.
//
// Element-wise rules, numbers by value so that a lazy framework can keep a call for later:
//
//   void xmem_optim_step(int rule, void* parameter, const void* gradient, int dtype, int64_t count,
//                        void* first, void* second, int bits, uint32_t seed, int flags,
//                        double beta1, double beta2, double eps, double keep, double l2,
//                        double rate, double root);
//
//   rule    0 Adam(W), 1 Lion, 2 SGD with momentum; `second` is not read by 1 and 2
//   dtype   of parameter and gradient: 0 float32, 1 float16, 2 bfloat16; the parameter is updated
//           in place, the gradient only read; both contiguous
//   seed    `optim_rules.seed_of(step, index)`; each state's rounding has a seed from it
//   flags   1 maximize, 2 Nesterov (SGD), 4 first step (SGD: the momentum is the gradient)
//   keep    1 - lr * decoupled decay; l2: coupled decay, added to the gradient
//   rate    Adam: lr / (1 - beta1^t); else lr.  root: Adam: 1 / sqrt(1 - beta2^t)
//   SGD     beta1 is the momentum, beta2 the dampening
//
//   void xmem_optim_many(int rule, const void* tasks, int64_t count): the same for many tensors at
//   once, in one parallel loop over all their blocks; `Task` is below.
//
//   void xmem_optim_adafactor(void* parameter, const void* gradient, int dtype, int64_t rows,
//                             int64_t columns, float* row, float* column, void* first, int bits,
//                             uint32_t seed, int flags, double beta1, double rest2, double eps1,
//                             double eps2, double keep, double rate, double clip);
//
//   The parameter is seen as a matrix (size of its first axis, the rest); `row` and `column` are its
//   factors, float32. A vector has rows = 1 and `row` null: `column` is its whole second moment.
//   `first` may be null (beta1 is not read then); bits is of `first` alone, 32, 8 or 4.
//   rest2 = t^beta2_decay, rate = min(lr, 1 / sqrt(t)), clip: the largest root mean square of an
//   update, flags 1: maximize.
//
// Nothing is allocated; results do not depend on the number of threads.
#include "codec.h"

#include <cmath>

using namespace xmem;

namespace {

enum Rule { ADAM = 0, LION = 1, SGD = 2 };
enum Flag { MAXIMIZE = 1, NESTEROV = 2, FIRST_STEP = 4 };

struct Task {
    void* parameter;
    const void* gradient;
    void* first;
    void* second;
    int64_t count;
    double beta1, beta2, eps, keep, l2, rate, root;
    uint32_t seed;
    int32_t dtype, bits, flags;
};

struct Numbers {
    float beta1, rest1, beta2, rest2, eps, keep, l2, rate, root, sign;
    bool nesterov, first_step;
    explicit Numbers(const Task& t)
        : beta1((float)t.beta1), rest1((float)(1.0 - t.beta1)), beta2((float)t.beta2),
          rest2((float)(1.0 - t.beta2)), eps((float)t.eps), keep((float)t.keep), l2((float)t.l2),
          rate((float)t.rate), root((float)t.root), sign(t.flags & MAXIMIZE ? -1.0f : 1.0f),
          nesterov(t.flags & NESTEROV), first_step(t.flags & FIRST_STEP) {}
};

constexpr int64_t GRAIN = 32;  // blocks for which a thread is worth its while

// Replaces values by roots of them whose stochastic rounding has the values as its mean: between
// two codes, the place is the share of the way between what they stand for. POWER is 2 or 4.
template <int POWER>
void lay_out(float* __restrict x, int style) {
    uint32_t largest = 0;
    float roots[BLOCK];
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < BLOCK; i++) {
        float r = std::sqrt(float_of(bits_of(x[i]) & MAGNITUDE));
        if (POWER == 4) r = std::sqrt(r);
        roots[i] = r;
        uint32_t a = bits_of(r) & MAGNITUDE;
        largest = a > largest ? a : largest;
    }
    const float least = POWER == 4 ? 0x1p-24f : 0x1p-48f;  // powers would be denormals
    const bool plain = largest >= INFINITE || float_of(largest) < least;
    const int count = levels(4, style == FLOOR ? MODE_FLOORED : MODE_PLAIN);
    const float scale = plain ? 1.0f : scale_for(largest, count, 4), inverse = 1.0f / scale;
    if (plain) {
        for (int i = 0; i < BLOCK; i++)
            x[i] = float_of(bits_of(roots[i]) | (bits_of(x[i]) & ~MAGNITUDE));
        return;
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        uint32_t b;
        std::memcpy(&b, x + i, 4);
        uint32_t magnitude = b & MAGNITUDE;
        float value;
        std::memcpy(&value, &magnitude, 4);
        float k = (float)(int32_t)(roots[i] * inverse);
        float low = k * scale, high = (k + 1.0f) * scale;
        low *= low, high *= high;
        if (POWER == 4) low *= low, high *= high;
        float share = (value - low) / (high - low);
        share = share < 0.0f ? 0.0f : share;
        share = share > 1.0f ? 1.0f : share;
        float y = (k + share) * scale;
        uint32_t laid;
        std::memcpy(&laid, &y, 4);
        laid |= b & ~MAGNITUDE;
        std::memcpy(x + i, &laid, 4);
    }
}

// One moment of a tensor, a block at a time.
template <int BITS>
struct State {
    uint8_t* packed;
    int64_t count;
    uint32_t seed;

    void get(int64_t block, int here, float* __restrict x) const {
        uint8_t codes[BLOCK];
        const uint8_t* source = packed + codes_at(count, block, BITS);
        uint32_t header;
        std::memcpy(&header, packed + 4 * block, 4);
        if (!(BITS == 8 && here == BLOCK)) {
            std::memset(codes, 0, BLOCK);
            split<BITS>(source, codes, here);
            source = codes;
        }
        dequantize<BITS>(header, source, x, 0x1p-126f, 0x1.fffffep127f);
        for (int i = here; i < BLOCK; i++) x[i] = 0;
    }

    void put(int64_t block, int here, const float* x, int style) const {
        uint8_t codes[BLOCK];
        const int64_t at = block * BLOCK;
        uint8_t* target = packed + codes_at(count, block, BITS);
        const bool direct = BITS == 8 && here == BLOCK;
        uint32_t header = quantize<BITS>(x, direct ? target : codes, style, (uint32_t)at,
                                         seed_at(at, seed));
        std::memcpy(packed + 4 * block, &header, 4);
        if (!direct) join<BITS>(codes, target, here);
    }
};

// Values of the first moment, and of the second: v at 32 bits, else its square root.
template <int BITS>
void get_first(void* state, int64_t count, int64_t block, int here, float* m) {
    if constexpr (BITS == 32) {
        std::memcpy(m, (float*)state + block * BLOCK, 4 * here);
        for (int i = here; i < BLOCK; i++) m[i] = 0;
    } else {
        State<BITS>{(uint8_t*)state, count, 0}.get(block, here, m);
        if (BITS == 4)
            for (int i = 0; i < BLOCK; i++) m[i] *= std::fabs(m[i]);
    }
}

template <int BITS>
void put_first(void* state, int64_t count, int64_t block, int here, float* m, uint32_t seed) {
    if constexpr (BITS == 32) {
        std::memcpy((float*)state + block * BLOCK, m, 4 * here);
    } else {
        if (BITS == 4) lay_out<2>(m, PLAIN);
        State<BITS>{(uint8_t*)state, count, hash(0, seed)}.put(block, here, m, PLAIN);
    }
}

template <int BITS>
void get_second(void* state, int64_t count, int64_t block, int here, float* v) {
    if constexpr (BITS == 32) {
        get_first<32>(state, count, block, here, v);
    } else {
        State<BITS>{(uint8_t*)state, count, 0}.get(block, here, v);
        for (int i = 0; i < BLOCK; i++) v[i] *= v[i];
        if (BITS == 4)
            for (int i = 0; i < BLOCK; i++) v[i] *= v[i];
    }
}

// `roots` are the square roots of v.
template <int BITS>
void put_second(void* state, int64_t count, int64_t block, int here, float* v, float* roots,
                uint32_t seed) {
    if constexpr (BITS == 32) {
        std::memcpy((float*)state + block * BLOCK, v, 4 * here);
    } else {
        if (BITS == 4) lay_out<4>(v, FLOOR);
        State<BITS>{(uint8_t*)state, count, hash(1, seed)}.put(block, here, BITS == 4 ? v : roots,
                                                             FLOOR);
    }
}

template <int BITS>
void adam(const Task& t, const Numbers& n, int64_t block, int here, const float* __restrict p,
          const float* __restrict g, float* __restrict result) {
    float m[BLOCK], v[BLOCK], roots[BLOCK];
    get_first<BITS>(t.first, t.count, block, here, m);
    get_second<BITS>(t.second, t.count, block, here, v);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        float d = g[i] * n.sign + p[i] * n.l2;
        float first = m[i] + (d - m[i]) * n.rest1;
        float second = v[i] * n.beta2 + n.rest2 * d * d;
        float root = std::sqrt(second);
        m[i] = first, v[i] = second, roots[i] = root;
        result[i] = p[i] * n.keep - n.rate * first / (root * n.root + n.eps);
    }
    put_first<BITS>(t.first, t.count, block, here, m, t.seed);
    put_second<BITS>(t.second, t.count, block, here, v, roots, t.seed);
}

template <int BITS>
void lion(const Task& t, const Numbers& n, int64_t block, int here, const float* __restrict p,
          const float* __restrict g, float* __restrict result) {
    float m[BLOCK];
    get_first<BITS>(t.first, t.count, block, here, m);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        float d = g[i] * n.sign + p[i] * n.l2;
        float mixed = m[i] * n.beta1 + d * n.rest1;
        float way = mixed > 0 ? n.rate : mixed < 0 ? -n.rate : mixed * n.rate;  // keeps NaN
        m[i] = m[i] * n.beta2 + d * n.rest2;
        result[i] = p[i] * n.keep - way;
    }
    put_first<BITS>(t.first, t.count, block, here, m, t.seed);
}

template <int BITS>
void sgd(const Task& t, const Numbers& n, int64_t block, int here, const float* __restrict p,
         const float* __restrict g, float* __restrict result) {
    float m[BLOCK];
    get_first<BITS>(t.first, t.count, block, here, m);
    const float old = n.first_step ? 0.0f : n.beta1, fresh = n.first_step ? 1.0f : n.rest2;
    const bool nesterov = n.nesterov;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        float d = g[i] * n.sign + p[i] * n.l2;
        float momentum = m[i] * old + d * fresh;
        float way = nesterov ? d + momentum * n.beta1 : momentum;
        m[i] = momentum;
        result[i] = p[i] * n.keep - n.rate * way;
    }
    put_first<BITS>(t.first, t.count, block, here, m, t.seed);
}

template <int BITS>
void update(int rule, const Task& t, const Numbers& n, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
        float p_buffer[BLOCK], g_buffer[BLOCK], result[BLOCK];
        const int64_t at = block * BLOCK;
        const int here = (int)std::min<int64_t>(BLOCK, t.count - at);
        const float* p = read(t.parameter, t.dtype, at, here, p_buffer);
        const float* g = read(t.gradient, t.dtype, at, here, g_buffer);
        if (rule == ADAM) adam<BITS>(t, n, block, here, p, g, result);
        if (rule == LION) lion<BITS>(t, n, block, here, p, g, result);
        if (rule == SGD) sgd<BITS>(t, n, block, here, p, g, result);
        write(result, t.parameter, t.dtype, at, here);
    }
}

void update(int rule, const Task& t, int64_t begin, int64_t end) {
    const Numbers n(t);
    if (t.bits == 8) update<8>(rule, t, n, begin, end);
    if (t.bits == 4) update<4>(rule, t, n, begin, end);
    if (t.bits == 32) update<32>(rule, t, n, begin, end);
}

// A parameter that Adafactor sees as a matrix.
struct Matrix {
    void* parameter;
    const void* gradient;
    int dtype;
    int64_t rows, columns;
    float *row, *column;
    float sign, least, mean;

    int64_t count() const { return rows * columns; }

    // The update of a block before it is clipped: the gradient over the root of its variance.
    void way(int64_t block, int here, float* __restrict x) const {
        float buffer[BLOCK], variance[BLOCK];
        const int64_t at = block * BLOCK;
        for (int i = here; i < BLOCK; i++) variance[i] = 1.0f;
        for (int i = 0; i < here;) {
            const int64_t r = (at + i) / columns, c = (at + i) % columns;
            const int length = (int)std::min<int64_t>(here - i, columns - c);
            for (int k = 0; k < length; k++)
                variance[i + k] = row ? row[r] * column[c + k] / mean : column[c + k];
            i += length;
        }
        const float* g = read(gradient, dtype, at, here, buffer);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) {
            float v = variance[i] < least ? least : variance[i];  // keeps NaN
            x[i] = g[i] * sign / std::sqrt(v);
        }
    }
};

constexpr int PARTS = 64;  // sums are of as many parts, whatever the number of threads

inline int64_t part_at(int64_t count, int part) { return count / PARTS * part + std::min<int64_t>(count % PARTS, part); }

double squares(const float* x) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < BLOCK; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

// The sum of what a function says of each block.
template <typename F>
double total(int64_t blocks, F of_block) {
    double parts[PARTS] = {0}, sum = 0;
#pragma omp parallel for schedule(static) if (blocks >= 2 * GRAIN)
    for (int part = 0; part < PARTS; part++) {
        double here = 0;
        for (int64_t block = part_at(blocks, part); block < part_at(blocks, part + 1); block++)
            here += of_block(block);
        parts[part] = here;
    }
    for (double part : parts) sum += part;
    return sum;
}

void factor_rows(const Matrix& m, float fresh) {
#pragma omp parallel for schedule(static) if (m.count() >= 2 * GRAIN * BLOCK)
    for (int64_t r = 0; r < m.rows; r++) {
        float buffer[BLOCK];
        double sum = 0;
        for (int64_t c = 0; c < m.columns; c += BLOCK) {
            const int here = (int)std::min<int64_t>(BLOCK, m.columns - c);
            sum += squares(read(m.gradient, m.dtype, r * m.columns + c, here, buffer));
        }
        m.row[r] += ((float)(sum / (double)m.columns) - m.row[r]) * fresh;
    }
}

void factor_columns(const Matrix& m, float fresh) {
    constexpr int WIDTH = BLOCK / 4;  // so that small matrices too are for several threads
#pragma omp parallel for schedule(static) if (m.count() >= 2 * GRAIN * BLOCK)
    for (int64_t c = 0; c < m.columns; c += WIDTH) {
        float buffer[BLOCK];
        double sums[WIDTH] = {0};
        const int here = (int)std::min<int64_t>(WIDTH, m.columns - c);
        for (int64_t r = 0; r < m.rows; r++) {
            const float* g = read(m.gradient, m.dtype, r * m.columns + c, here, buffer);
            for (int i = 0; i < here; i++) sums[i] += (double)g[i] * (double)g[i];
        }
        for (int i = 0; i < here; i++) {
            float& held = m.column[c + i];
            held += ((float)(sums[i] / (double)m.rows) - held) * fresh;
        }
    }
}

template <int BITS>
void move(const Matrix& m, int64_t block, int here, float keep, float rate, void* first, float beta1,
          float rest1, uint32_t seed) {
    float p_buffer[BLOCK], x[BLOCK], momentum[BLOCK];
    const int64_t at = block * BLOCK;
    m.way(block, here, x);
    const float* p = read(m.parameter, m.dtype, at, here, p_buffer);
    if (first) {
        get_first<BITS>(first, m.count(), block, here, momentum);
        for (int i = 0; i < BLOCK; i++) {
            float d = x[i] * rate;
            momentum[i] = momentum[i] + (d - momentum[i]) * rest1;
            x[i] = p[i] * keep - momentum[i];
        }
        put_first<BITS>(first, m.count(), block, here, momentum, seed);
    } else {
        for (int i = 0; i < BLOCK; i++) x[i] = p[i] * keep - x[i] * rate;
    }
    write(x, m.parameter, m.dtype, at, here);
}

}  // namespace

extern "C" {

void xmem_optim_step(int rule, void* parameter, const void* gradient, int dtype, int64_t count,
                     void* first, void* second, int bits, uint32_t seed, int flags, double beta1,
                     double beta2, double eps, double keep, double l2, double rate, double root) {
    const Task t = {parameter, gradient, first, second, count, beta1, beta2, eps,
                    keep,      l2,       rate,  root,   seed,  dtype, bits,  flags};
    const int64_t blocks = blocks_of(count), pieces = (blocks + GRAIN - 1) / GRAIN;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t piece = 0; piece < pieces; piece++)
        update(rule, t, piece * GRAIN, std::min(blocks, (piece + 1) * GRAIN));
}

void xmem_optim_many(int rule, const void* tasks, int64_t count) {
    const Task* all = (const Task*)tasks;
    int64_t blocks = 0;
    for (int64_t i = 0; i < count; i++) blocks += blocks_of(all[i].count);
    const int64_t pieces = (blocks + GRAIN - 1) / GRAIN;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t begin = piece * GRAIN, end = std::min(blocks, begin + GRAIN), at = 0;
        for (int64_t i = 0; i < count && at < end; i++) {
            const int64_t own = blocks_of(all[i].count);
            const int64_t from = std::max(begin, at) - at, to = std::min(end, at + own) - at;
            if (from < to) update(rule, all[i], from, to);
            at += own;
        }
    }
}

void xmem_optim_adafactor(void* parameter, const void* gradient, int dtype, int64_t rows,
                          int64_t columns, float* row, float* column, void* first, int bits,
                          uint32_t seed, int flags, double beta1, double rest2, double eps1,
                          double eps2, double keep, double rate, double clip) {
    Matrix m = {parameter, gradient, dtype, rows, columns, row, column, 1.0f, 0.0f, 1.0f};
    m.sign = flags & MAXIMIZE ? -1.0f : 1.0f;
    m.least = (float)(eps1 * eps1);
    const int64_t count = m.count(), blocks = blocks_of(count);
    auto size = [=](int64_t block) { return (int)std::min<int64_t>(BLOCK, count - block * BLOCK); };
    factor_columns(m, (float)rest2);
    if (row) {
        factor_rows(m, (float)rest2);
        double sum = 0;
        for (int64_t r = 0; r < rows; r++) sum += row[r];
        m.mean = (float)(sum / (double)rows);
        if (m.mean < (float)eps1) m.mean = (float)eps1;
    }
    const double length = std::sqrt(total(blocks, [&](int64_t block) {
        float buffer[BLOCK];
        return squares(read(m.parameter, m.dtype, block * BLOCK, size(block), buffer));
    }));
    const double way = std::sqrt(total(blocks, [&](int64_t block) {
        float x[BLOCK];
        m.way(block, size(block), x);
        return squares(x);
    }));
    const double whole = std::sqrt((double)count), scaled = length / whole;
    const double reached = way / (whole * clip);
    // Written so that NaN goes on.
    const float step = (float)((scaled < eps2 ? eps2 : scaled) * rate / (reached < 1.0 ? 1.0 : reached));
    const float rest1 = (float)(1.0 - beta1);
#pragma omp parallel for schedule(static) if (blocks >= 2 * GRAIN)
    for (int64_t b = 0; b < blocks; b++) {
        if (bits == 8) move<8>(m, b, size(b), (float)keep, step, first, (float)beta1, rest1, seed);
        if (bits == 4) move<4>(m, b, size(b), (float)keep, step, first, (float)beta1, rest1, seed);
        if (bits == 32) move<32>(m, b, size(b), (float)keep, step, first, (float)beta1, rest1, seed);
    }
}
}
