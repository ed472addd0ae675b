// Products of small batches with large matrices, one for each stacked client.
//
// torch's own products are slow for such sizes.
//
// Written with the vector types of GCC and Clang, so for any processor. NaN and infinities pass as
// they do in torch: nothing is skipped, and nothing is assumed to be finite.
// Shape suffixes: C clients, B samples, I inputs, O outputs. All tensors are contiguous.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>

namespace {

// Bytes of a vector, and the outputs to sum at once: with SAMPLES of each they fill the registers.
#if defined(__AVX512F__)
constexpr int BYTES = 64, OUTPUTS = 5;
#elif defined(__AVX__)
constexpr int BYTES = 32, OUTPUTS = 2;
#else
constexpr int BYTES = 16, OUTPUTS = 2;
#endif
constexpr int SAMPLES = 5;
// Vectors of a weight row to update at once.
constexpr int STRIPE = 7;

template <typename T>
struct Vector {
    typedef T type __attribute__((vector_size(BYTES)));
};
template <typename T>
using vector = typename Vector<T>::type;
template <typename T>
constexpr int64_t lanes = BYTES / sizeof(T);

template <typename T>
inline vector<T> load(const T* source) {
    vector<T> values;
    std::memcpy(&values, source, BYTES);
    return values;
}
template <typename T>
inline void store(T* target, vector<T> values) {
    std::memcpy(target, &values, BYTES);
}

// ── linear: y = x weight^T ──────────────────────────────────────────────────────────────────────

// The products of B samples with O rows of the weight.
template <typename T, int B, int O>
inline void multiply_block(T* y, const T* x, const T* weight, int64_t outputs, int64_t inputs) {
    vector<T> sums[B][O] = {};
    int64_t i = 0;
    for (; i + lanes<T> <= inputs; i += lanes<T>) {
        vector<T> rows[O];
        for (int o = 0; o < O; ++o) rows[o] = load(weight + o * inputs + i);
        for (int b = 0; b < B; ++b) {
            const vector<T> sample = load(x + b * inputs + i);
            for (int o = 0; o < O; ++o) sums[b][o] += sample * rows[o];
        }
    }
    for (int b = 0; b < B; ++b)
        for (int o = 0; o < O; ++o) {
            T sum = 0;
            for (int lane = 0; lane < lanes<T>; ++lane) sum += sums[b][o][lane];
            for (int64_t rest = i; rest < inputs; ++rest)
                sum += x[b * inputs + rest] * weight[o * inputs + rest];
            y[b * outputs + o] = sum;
        }
}

// The products of all samples with O rows of the weight.
template <typename T, int O>
inline void multiply_rows(
    T* y, const T* x, const T* weight, int64_t batch, int64_t outputs, int64_t inputs) {
    int64_t b = 0;
    for (; b + SAMPLES <= batch; b += SAMPLES)
        multiply_block<T, SAMPLES, O>(y + b * outputs, x + b * inputs, weight, outputs, inputs);
    for (; b < batch; ++b)
        multiply_block<T, 1, O>(y + b * outputs, x + b * inputs, weight, outputs, inputs);
}

template <typename T>
void multiply_all(
    const at::Tensor& y_CBO, const at::Tensor& x_CBI, const at::Tensor& weight_COI) {
    const int64_t clients = x_CBI.size(0), batch = x_CBI.size(1);
    const int64_t outputs = weight_COI.size(1), inputs = weight_COI.size(2);
    const T* x = x_CBI.const_data_ptr<T>();
    const T* weight = weight_COI.const_data_ptr<T>();
    T* y = y_CBO.mutable_data_ptr<T>();
    for (int64_t c = 0; c < clients; ++c) {
        int64_t o = 0;
        for (; o + OUTPUTS <= outputs; o += OUTPUTS)
            multiply_rows<T, OUTPUTS>(y + o, x, weight + o * inputs, batch, outputs, inputs);
        for (; o < outputs; ++o)
            multiply_rows<T, 1>(y + o, x, weight + o * inputs, batch, outputs, inputs);
        y += batch * outputs;
        x += batch * inputs;
        weight += outputs * inputs;
    }
}

at::Tensor linear(const at::Tensor& x_CBI, const at::Tensor& weight_COI) {
    at::Tensor y_CBO = x_CBI.new_empty({x_CBI.size(0), x_CBI.size(1), weight_COI.size(1)});
    const bool is_float = x_CBI.scalar_type() == at::kFloat;
    const auto multiply = is_float ? multiply_all<float> : multiply_all<double>;
    multiply(y_CBO, x_CBI.contiguous(), weight_COI.contiguous());
    return y_CBO;
}

// ── sgd_update_: velocity = momentum velocity + y_grad^T x, weight -= rate velocity, in one pass ──

// Update N vectors of one row of the weight.
template <typename T, int N>
inline void update_stripe(T* weight, T* velocity, const T* y_grad, const T* x, int64_t batch,
                          int64_t outputs, int64_t inputs, T momentum, T rate) {
    vector<T> sums[N];  // in registers, so the loops over it must be unrolled early
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[n] = momentum * load(velocity + n * lanes<T>);
    for (int64_t b = 0; b < batch; ++b) {
        const T factor = y_grad[b * outputs];
        for (int n = 0; n < N; ++n) sums[n] += factor * load(x + b * inputs + n * lanes<T>);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
        store(velocity + n * lanes<T>, sums[n]);
        store(weight + n * lanes<T>, load(weight + n * lanes<T>) - rate * sums[n]);
    }
}

// Update one row of the weight.
template <typename T>
inline void update_row(T* weight, T* velocity, const T* y_grad, const T* x, int64_t batch,
                       int64_t outputs, int64_t inputs, T momentum, T rate) {
    int64_t i = 0;
    for (; i + STRIPE * lanes<T> <= inputs; i += STRIPE * lanes<T>)
        update_stripe<T, STRIPE>(
            weight + i, velocity + i, y_grad, x + i, batch, outputs, inputs, momentum, rate);
    for (; i + lanes<T> <= inputs; i += lanes<T>)
        update_stripe<T, 1>(
            weight + i, velocity + i, y_grad, x + i, batch, outputs, inputs, momentum, rate);
    for (; i < inputs; ++i) {
        T sum = momentum * velocity[i];
        for (int64_t b = 0; b < batch; ++b) sum += y_grad[b * outputs] * x[b * inputs + i];
        velocity[i] = sum;
        weight[i] -= rate * sum;
    }
}

template <typename T>
void update_all(const at::Tensor& weight_COI, const at::Tensor& velocity_COI,
                const at::Tensor& y_grad_CBO, const at::Tensor& x_CBI,
                const at::Tensor& rate_tensor, double momentum_number) {
    const int64_t clients = x_CBI.size(0), batch = x_CBI.size(1);
    const int64_t outputs = weight_COI.size(1), inputs = weight_COI.size(2);
    const T rate = *rate_tensor.const_data_ptr<T>();
    const T momentum = static_cast<T>(momentum_number);
    T* weight = weight_COI.mutable_data_ptr<T>();
    T* velocity = velocity_COI.mutable_data_ptr<T>();
    const T* y_grad = y_grad_CBO.const_data_ptr<T>();
    const T* x = x_CBI.const_data_ptr<T>();
    for (int64_t c = 0; c < clients; ++c) {
        for (int64_t o = 0; o < outputs; ++o) {
            update_row<T>(
                weight, velocity, y_grad + o, x, batch, outputs, inputs, momentum, rate);
            weight += inputs;
            velocity += inputs;
        }
        y_grad += batch * outputs;
        x += batch * inputs;
    }
}

void sgd_update_(at::Tensor weight_COI, at::Tensor velocity_COI, const at::Tensor& y_grad_CBO,
                 const at::Tensor& x_CBI, const at::Tensor& rate, double momentum) {
    TORCH_CHECK(weight_COI.is_contiguous() && velocity_COI.is_contiguous(),
                "sgd_update_ writes contiguous tensors only");
    const bool is_float = x_CBI.scalar_type() == at::kFloat;
    const auto update = is_float ? update_all<float> : update_all<double>;
    update(weight_COI, velocity_COI, y_grad_CBO.contiguous(), x_CBI.contiguous(), rate, momentum);
}

}  // namespace

TORCH_LIBRARY(fedcover, library) {
    library.def("linear(Tensor x, Tensor weight) -> Tensor");
    library.def(
        "sgd_update_(Tensor(a!) weight, Tensor(b!) velocity, Tensor y_grad, Tensor x, "
        "Tensor rate, float momentum) -> ()");
}
TORCH_LIBRARY_IMPL(fedcover, CPU, library) {
    library.impl("linear", linear);
    library.impl("sgd_update_", sgd_update_);
}
