// Small batches times large matrices, one of each for every client of a crew: what torch's own products are slow at.
//
// Written with the vector types of GCC and Clang, so for any processor. Nothing is skipped and nothing assumed finite:
// NaN and infinities pass as they do in torch. C clients, B samples, I inputs, O outputs; all tensors contiguous.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>

namespace {

// Bytes of a vector, and how many outputs are summed at once: with SAMPLES of each they fill the registers.
#if defined(__AVX512F__)
constexpr int BYTES = 64, OUTPUTS = 5;
#elif defined(__AVX__)
constexpr int BYTES = 32, OUTPUTS = 2;
#else
constexpr int BYTES = 16, OUTPUTS = 2;
#endif
constexpr int SAMPLES = 5, STRIPE = 7;

template <typename T>
struct Vector {
    typedef T type __attribute__((vector_size(BYTES)));
};
template <typename T>
using vector = typename Vector<T>::type;
template <typename T>
constexpr int64_t lanes = BYTES / sizeof(T);

template <typename T>
inline vector<T> load(const T* place) {
    vector<T> some;
    std::memcpy(&some, place, BYTES);
    return some;
}
template <typename T>
inline void store(T* place, vector<T> some) {
    std::memcpy(place, &some, BYTES);
}

// ── y = x weight^T ──────────────────────────────────────────────────────────────────────────────────────

template <typename T, int B, int O>
inline void dots(T* y, const T* x, const T* weight, int64_t outputs, int64_t inputs) {
    vector<T> sums[B][O] = {};
    int64_t i = 0;
    for (; i + lanes<T> <= inputs; i += lanes<T>) {
        vector<T> some[O];
        for (int o = 0; o < O; ++o) some[o] = load(weight + o * inputs + i);
        for (int b = 0; b < B; ++b) {
            const vector<T> sample = load(x + b * inputs + i);
            for (int o = 0; o < O; ++o) sums[b][o] += sample * some[o];
        }
    }
    for (int b = 0; b < B; ++b)
        for (int o = 0; o < O; ++o) {
            T sum = 0;
            for (int lane = 0; lane < lanes<T>; ++lane) sum += sums[b][o][lane];
            for (int64_t rest = i; rest < inputs; ++rest) sum += x[b * inputs + rest] * weight[o * inputs + rest];
            y[b * outputs + o] = sum;
        }
}

template <typename T, int O>
inline void samples(T* y, const T* x, const T* weight, int64_t batch, int64_t outputs, int64_t inputs) {
    int64_t b = 0;
    for (; b + SAMPLES <= batch; b += SAMPLES)
        dots<T, SAMPLES, O>(y + b * outputs, x + b * inputs, weight, outputs, inputs);
    for (; b < batch; ++b) dots<T, 1, O>(y + b * outputs, x + b * inputs, weight, outputs, inputs);
}

template <typename T>
void multiply(const at::Tensor& y_CBO, const at::Tensor& x_CBI, const at::Tensor& weight_COI) {
    const int64_t batch = x_CBI.size(1), outputs = weight_COI.size(1), inputs = weight_COI.size(2);
    const T *x = x_CBI.const_data_ptr<T>(), *weight = weight_COI.const_data_ptr<T>();
    T* y = y_CBO.mutable_data_ptr<T>();
    for (int64_t c = 0; c < x_CBI.size(0); ++c, y += batch * outputs, x += batch * inputs, weight += outputs * inputs) {
        int64_t o = 0;
        for (; o + OUTPUTS <= outputs; o += OUTPUTS)
            samples<T, OUTPUTS>(y + o, x, weight + o * inputs, batch, outputs, inputs);
        for (; o < outputs; ++o) samples<T, 1>(y + o, x, weight + o * inputs, batch, outputs, inputs);
    }
}

at::Tensor linear(const at::Tensor& x_CBI, const at::Tensor& weight_COI) {
    at::Tensor y_CBO = x_CBI.new_empty({x_CBI.size(0), x_CBI.size(1), weight_COI.size(1)});
    const auto work = x_CBI.scalar_type() == at::kFloat ? multiply<float> : multiply<double>;
    work(y_CBO, x_CBI.contiguous(), weight_COI.contiguous());
    return y_CBO;
}

// ── velocity = momentum velocity + back^T x, weight -= rate velocity, in one pass ───────────────────────────

template <typename T, int N>
inline void stripe(T* weight, T* velocity, const T* back, const T* x, int64_t batch, int64_t outputs, int64_t inputs,
                   T momentum, T rate) {
    vector<T> sums[N];  // in registers, so the loops over it must be unrolled early
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[n] = momentum * load(velocity + n * lanes<T>);
    for (int64_t b = 0; b < batch; ++b) {
        const T factor = back[b * outputs];
        for (int n = 0; n < N; ++n) sums[n] += factor * load(x + b * inputs + n * lanes<T>);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
        store(velocity + n * lanes<T>, sums[n]);
        store(weight + n * lanes<T>, load(weight + n * lanes<T>) - rate * sums[n]);
    }
}

template <typename T>
void move(const at::Tensor& weight_COI, const at::Tensor& velocity_COI, const at::Tensor& back_CBO,
          const at::Tensor& x_CBI, const at::Tensor& rate_tensor, double momentum_number) {
    const int64_t batch = x_CBI.size(1), outputs = weight_COI.size(1), inputs = weight_COI.size(2);
    const T rate = *rate_tensor.const_data_ptr<T>(), momentum = static_cast<T>(momentum_number);
    T *weight = weight_COI.mutable_data_ptr<T>(), *velocity = velocity_COI.mutable_data_ptr<T>();
    const T *backs = back_CBO.const_data_ptr<T>(), *x = x_CBI.const_data_ptr<T>();
    for (int64_t c = 0; c < x_CBI.size(0); ++c, backs += batch * outputs, x += batch * inputs)
        for (const T* back = backs; back < backs + outputs; ++back, weight += inputs, velocity += inputs) {
            int64_t i = 0;
            for (; i + STRIPE * lanes<T> <= inputs; i += STRIPE * lanes<T>)
                stripe<T, STRIPE>(weight + i, velocity + i, back, x + i, batch, outputs, inputs, momentum, rate);
            for (; i + lanes<T> <= inputs; i += lanes<T>)
                stripe<T, 1>(weight + i, velocity + i, back, x + i, batch, outputs, inputs, momentum, rate);
            for (; i < inputs; ++i) {
                T sum = momentum * velocity[i];
                for (int64_t b = 0; b < batch; ++b) sum += back[b * outputs] * x[b * inputs + i];
                velocity[i] = sum;
                weight[i] -= rate * sum;
            }
        }
}

void descend_(at::Tensor weight_COI, at::Tensor velocity_COI, const at::Tensor& back_CBO, const at::Tensor& x_CBI,
              const at::Tensor& rate, double momentum) {
    TORCH_CHECK(weight_COI.is_contiguous() && velocity_COI.is_contiguous(), "descend_ writes contiguous tensors only");
    const auto work = x_CBI.scalar_type() == at::kFloat ? move<float> : move<double>;
    work(weight_COI, velocity_COI, back_CBO.contiguous(), x_CBI.contiguous(), rate, momentum);
}

}  // namespace

TORCH_LIBRARY(fedcover, library) {
    library.def("linear(Tensor x, Tensor weight) -> Tensor");
    library.def("descend_(Tensor(a!) weight, Tensor(b!) velocity, Tensor back, Tensor x, Tensor rate, float momentum) -> ()");
}
TORCH_LIBRARY_IMPL(fedcover, CPU, library) {
    library.impl("linear", linear);
    library.impl("descend_", descend_);
}
