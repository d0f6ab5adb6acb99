// Changes of placements on local tensors: a program of collectives and copies that Python has made, run without Python.
//
// See vescale/placements/_native_moves.py, whose tuples are read here.

#pragma once

#include "call.h"
#include "interpreter.h"
#include "torch_versions.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <string>

namespace vescale {

using Sizes = c10::SmallVector<std::int64_t, 5>;

// Waits for a collective. Where the host waits for other ranks, what is to be done in a long wait is done in Python.
inline void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& out) {
    if (!out.is_cpu()) {
        work->wait();
        return;
    }
    try {
        work->wait(std::chrono::seconds(1));
    } catch (const std::exception&) {  // not within this time, or an error, which is raised again
        const Gil gil;
        const auto wait = py::module_::import("vescale.comm._long_waits").attr("wait_for_work");
        owned(PyObject_CallFunctionObjArgs(wait.ptr(), py::cast(work).ptr(), py::cast(out).ptr(), nullptr));
    }
}

inline Sizes sizes_of(py::handle numbers) {
    Sizes sizes;
    for (const auto& number : numbers.cast<py::tuple>()) {
        sizes.push_back(number.cast<std::int64_t>());
    }
    return sizes;
}

inline Sizes contiguous_strides(c10::IntArrayRef sizes) {
    Sizes strides(sizes.size(), 1);
    for (auto i = static_cast<std::int64_t>(sizes.size()) - 2; i >= 0; --i) {
        strides[i] = strides[i + 1] * std::max<std::int64_t>(sizes[i + 1], 1);
    }
    return strides;
}

// Blocks of equal sizes, each at a constant distance from the one before; the fields are those of NativeCopy.
struct Copy {
    Sizes sizes;
    Sizes source;  // the first block: an index of the local tensor, or an offset if there are strides
    std::optional<Sizes> source_strides;
    std::int64_t target;
    Sizes target_strides;
    std::int64_t count;
    Sizes source_step;
    std::int64_t target_step;

    explicit Copy(const py::tuple& given)
        : sizes(sizes_of(given[0])),
          source(sizes_of(given[1])),
          target(given[3].cast<std::int64_t>()),
          target_strides(sizes_of(given[4])),
          count(given[5].cast<std::int64_t>()),
          source_step(sizes_of(given[6])),
          target_step(given[7].cast<std::int64_t>()) {
        if (!given[2].is_none()) {
            source_strides = sizes_of(given[2]);
        }
        if (count > 1) {
            sizes.insert(sizes.begin(), count);
            target_strides.insert(target_strides.begin(), target_step);
        }
    }

    void run(const at::Tensor& from, const at::Tensor& to) const {
        const c10::IntArrayRef own = source_strides ? c10::IntArrayRef(*source_strides) : from.strides();
        Sizes strides(own.begin(), own.end());
        const auto distance = [&](const Sizes& index) {
            std::int64_t sum = 0;
            for (const auto i : c10::irange(index.size())) {
                sum += index[i] * (source_strides ? 1 : strides[i]);
            }
            return sum;
        };
        const auto offset = distance(source);
        if (count > 1) {
            strides.insert(strides.begin(), distance(source_step));
        }
        const bool is_all = offset == 0 && target == 0 && from.sizes() == sizes && to.sizes() == sizes;
        if (is_all && from.strides() == strides && to.strides() == target_strides) {
            to.copy_(from);
            return;
        }
        to.as_strided(sizes, target_strides, to.storage_offset() + target)
            .copy_(from.as_strided(sizes, strides, from.storage_offset() + offset));
    }
};

inline std::vector<Copy> copies_of(py::handle given) {
    std::vector<Copy> copies;
    for (const auto& copy : py::reinterpret_borrow<py::tuple>(given)) {
        copies.emplace_back(py::reinterpret_borrow<py::tuple>(copy));
    }
    return copies;
}

// The memory of elements of a tensor without gaps.
inline at::Tensor bytes_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t end) {
    const auto size = static_cast<std::int64_t>(tensor.element_size());
    auto bytes = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(tensor.storage()),
        c10::DispatchKeySet(tensor.options().computeDispatchKey()),
        caffe2::TypeMeta::Make<std::uint8_t>());
    auto* impl = bytes.unsafeGetTensorImpl();
    impl->set_storage_offset((tensor.storage_offset() + begin) * size);
    impl->set_sizes_contiguous({(end - begin) * size});
    return bytes;
}

// Reduces the rows of `received`, one of each rank, into `out`; the rows are undefined afterwards. In pairs, and pairs of
// pairs; half precision one after the other in float32: the order of vescale.comm, so that ranks in Python agree.
class RowReduction {
  public:
    RowReduction(const std::string& op, std::int64_t num_rows) : op_(op.empty() ? '+' : op[0]), num_rows_(num_rows) {
        op_ = op == "max" ? 'M' : op == "min" ? 'm' : op == "product" ? '*' : '+';
        divides_ = op == "avg";
    }

    void run(const at::Tensor& received, const at::Tensor& out) const {
        const auto row = out.numel();
        const auto rows = [&](std::int64_t first, std::int64_t count, std::int64_t distance) {
            return received.as_strided({count, row}, {distance * row, 1}, received.storage_offset() + first * row);
        };
        const auto target = out.as_strided({1, row}, {row, 1}, out.storage_offset());
        if (out.scalar_type() == at::kHalf || out.scalar_type() == at::kBFloat16) {
            at::Tensor sum = rows(0, 1, 1).to(at::kFloat);
            for (const auto i : c10::irange(1, num_rows_)) {
                combine(sum, sum, rows(i, 1, 1));
            }
            if (divides_) {
                sum.div_(num_rows_);
            }
            target.copy_(sum);
            return;
        }
        if (num_rows_ == 1) {
            target.copy_(rows(0, 1, 1));
        } else {
            std::int64_t left = num_rows_, distance = 1;
            while (left > 2) {  // of an odd number, the last row waits for the next round
                const at::Tensor first = rows(0, left / 2, 2 * distance);
                combine(first, first, rows(distance, left / 2, 2 * distance));
                left = (left + 1) / 2;
                distance *= 2;
            }
            combine(target, rows(0, 1, 1), rows(distance, 1, 1));
        }
        if (divides_) {
            target.div_(num_rows_);
        }
    }

  private:
    void combine(at::Tensor out, const at::Tensor& a, const at::Tensor& b) const {
        switch (op_) {
            case 'M':
                at::maximum_out(out, a, b);
                return;
            case 'm':
                at::minimum_out(out, a, b);
                return;
            case '*':
                at::mul_out(out, a, b);
                return;
            default:
                at::add_out(out, a, b);
        }
    }

    char op_;
    std::int64_t num_rows_;
    bool divides_ = false;
};

// `part`, a shard of `whole`, with the strides of `whole`: 0 for dims that are expanded, the others in the same order. Strides
// determine the strides of results and the order of sums.
inline at::Tensor expanded_as(const at::Tensor& whole, at::Tensor part) {
    if (whole.dim() != part.dim()) {
        return part;
    }
    Sizes once(part.sizes().begin(), part.sizes().end());
    bool is_expanded = false;
    for (const auto dim : c10::irange(whole.dim())) {
        if (whole.size(dim) > 1 && whole.stride(dim) == 0) {
            once[dim] = std::min<std::int64_t>(once[dim], 1);
            is_expanded = true;
        }
    }
    if (!is_expanded) {
        return part;
    }
    Sizes order(whole.dim()), back(whole.dim());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return whole.stride(a) > whole.stride(b); });
    for (const auto place : c10::irange(order.size())) {
        back[order[place]] = static_cast<std::int64_t>(place);
    }
    return part.as_strided(once, part.strides()).permute(order).contiguous().permute(back).expand(part.sizes());
}

// One launch, or one local copy; the fields are those of NativeStep.
class Step {
  public:
    explicit Step(const py::tuple& given)
        : kind_(kind_of(given[0].cast<std::string>())),
          shape_(sizes_of(given[1])),
          divisor_(given[4].cast<std::int64_t>()),
          packed_(copies_of(given[6])),
          packed_size_(given[7].cast<std::int64_t>()),
          received_size_(given[10].cast<std::int64_t>()),
          rows_(given[11].cast<std::string>(), given[12].cast<std::int64_t>()),
          num_rows_(given[12].cast<std::int64_t>()),
          is_in_place_(given[13].is_none()) {
        if (!given[2].is_none()) {
            group_ = given[2].cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
        }
        if (!given[3].is_none()) {
            op_ = given[3].cast<c10d::ReduceOp::RedOpType>();
        }
        if (!given[5].is_none()) {
            span_ = given[5].cast<std::pair<std::int64_t, std::int64_t>>();
        }
        sends_ = given[8].cast<std::vector<std::int64_t>>();
        receives_ = given[9].cast<std::vector<std::int64_t>>();
        if (!is_in_place_) {
            unpacked_ = copies_of(given[13]);
        }
        if (!given[14].is_none()) {
            neutral_ = PyFloat_Check(given[14].ptr()) ? at::Scalar(given[14].cast<double>())
                                                       : at::Scalar(given[14].cast<std::int64_t>());
        }
        factors_ = given[15].cast<std::vector<std::int64_t>>();
    }

    bool communicates() const { return kind_ != Kind::kClone && kind_ != Kind::kCopy; }

    at::Tensor run(const at::Tensor& local) const {
        if (kind_ == Kind::kClone) {
            return local.clone(at::MemoryFormat::Contiguous);
        }
        if (kind_ == Kind::kAllReduce) {
            return all_reduced(local);
        }
        at::Tensor out = at::empty(shape_, local.options());
        if (neutral_) {
            out.fill_(*neutral_);
        }
        if (kind_ == Kind::kCopy) {
            unpack(local, out);
        } else {
            communicate(local, out);
        }
        for (const auto factor : factors_) {
            factor == 0 ? out.zero_() : out.mul_(factor);
        }
        return kind_ == Kind::kCopy && !neutral_ && factors_.empty() ? expanded_as(local, out) : out;
    }

  private:
    enum class Kind { kClone, kCopy, kAllReduce, kAllGather, kAllToAll, kReduceScatter };

    static Kind kind_of(const std::string& name) {
        for (const auto& [known, kind] : {
                 std::pair{"clone", Kind::kClone},
                 std::pair{"copy", Kind::kCopy},
                 std::pair{"all_reduce", Kind::kAllReduce},
                 std::pair{"all_gather", Kind::kAllGather},
                 std::pair{"all_to_all", Kind::kAllToAll},
                 std::pair{"reduce_scatter", Kind::kReduceScatter}}) {
            if (name == known) {
                return kind;
            }
        }
        TORCH_CHECK_VALUE(false, "no step of kind ", name);
    }

    void unpack(const at::Tensor& from, const at::Tensor& out) const {
        for (const auto& copy : unpacked_) {
            copy.run(from, out);
        }
    }

    at::Tensor all_reduced(const at::Tensor& local) const {
        at::Tensor out = local.clone(at::MemoryFormat::Contiguous);
        std::vector<at::Tensor> tensors{out};
        c10d::AllreduceOptions options;
        options.reduceOp = op_;
        wait_for(group_->allreduce(tensors, options), out);
        if (divisor_ > 1) {
            out.div_(divisor_);
        }
        return out;
    }

    // What is sent, without gaps, and where it begins.
    std::pair<at::Tensor, std::int64_t> packed(const at::Tensor& local) const {
        if (span_ && local.is_contiguous()) {
            return {local, span_->first};
        }
        const auto size = std::accumulate(packed_.begin(), packed_.end(), std::int64_t{0}, [](auto sum, const auto& copy) {
            return sum + c10::multiply_integers(copy.sizes);
        });
        auto sent = size < packed_size_ ? at::zeros({packed_size_}, local.options()) : at::empty({packed_size_}, local.options());
        for (const auto& copy : packed_) {
            copy.run(local, sent);
        }
        return {std::move(sent), 0};
    }

    void communicate(const at::Tensor& local, const at::Tensor& out) const {
        const auto [sent, begin] = packed(local);
        const auto end = begin + (span_ ? span_->second - span_->first : packed_size_);
        const bool is_direct = is_in_place_ && num_rows_ == 0;
        at::Tensor received = is_direct ? out : at::empty({received_size_}, local.options());
        if (kind_ == Kind::kReduceScatter) {  // of numbers, not of bytes
            at::Tensor from = sent.as_strided({end - begin}, {1}, sent.storage_offset() + begin);
            at::Tensor to = received.view({-1});
            c10d::ReduceScatterOptions options;
            options.reduceOp = op_;
            wait_for(reduce_scatter(*group_, to, from, options), to);
        } else {
            at::Tensor from = bytes_of(sent, begin, end);
            at::Tensor to = bytes_of(received, 0, received.numel());
            if (kind_ == Kind::kAllGather) {
                wait_for(all_gather(*group_, to, from), to);
            } else {
                const auto size = static_cast<std::int64_t>(local.element_size());
                auto sends = sends_, receives = receives_;
                for (auto* sizes : {&sends, &receives}) {
                    for (auto& number : *sizes) {
                        number *= size;
                    }
                }
                wait_for(all_to_all(*group_, to, from, receives, sends), to);
            }
        }
        if (num_rows_ > 0) {
            at::Tensor reduced = is_in_place_ ? out.view({-1}) : at::empty({received_size_ / num_rows_}, local.options());
            rows_.run(received, reduced);
            received = std::move(reduced);
        }
        if (!is_in_place_) {
            unpack(received, out);
        }
    }

    Kind kind_;
    Sizes shape_;
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
    c10d::ReduceOp op_;
    std::int64_t divisor_;
    std::optional<std::pair<std::int64_t, std::int64_t>> span_;
    std::vector<Copy> packed_;
    std::int64_t packed_size_;
    std::vector<std::int64_t> sends_, receives_;
    std::int64_t received_size_;
    RowReduction rows_;
    std::int64_t num_rows_;
    std::vector<Copy> unpacked_;
    bool is_in_place_;
    std::optional<at::Scalar> neutral_;
    std::vector<std::int64_t> factors_;
};

// How local tensors of one shape, dtype and kind of device get from placements to others; the fields are those of NativeMove.
class Program {
  public:
    explicit Program(const py::tuple& given)
        : shape_(sizes_of(given[0])), device_(c10::Device(given[2].cast<std::string>()).type()) {
        TORCH_CHECK_TYPE(THPDtype_Check(given[1].ptr()), "expected a dtype");
        dtype_ = reinterpret_cast<THPDtype*>(given[1].ptr())->scalar_type;
        for (const auto& step : py::reinterpret_borrow<py::tuple>(given[3])) {
            steps_.emplace_back(py::reinterpret_borrow<py::tuple>(step));
            communicates_ |= steps_.back().communicates();
        }
    }

    // Local tensors may differ from what their spec says; Python deals with them.
    bool is_for(const at::Tensor& local) const {
        return local.sizes() == shape_ && local.scalar_type() == dtype_ && local.device().type() == device_;
    }

    bool communicates() const { return communicates_; }

    // The lock is held; it is given up while ranks are waited for.
    at::Tensor run(const at::Tensor& local) const {
        at::Tensor made = local;  // another thread may replace the DTensor's
        const Unlocked unlocked(communicates_ || elements_of(local) > kLargeCall);
        const at::AutoDispatchBelowADInplaceOrView guard;
        for (const auto& step : steps_) {
            made = step.run(made);
        }
        return made;
    }

  private:
    Sizes shape_;
    at::ScalarType dtype_;
    c10::DeviceType device_;
    std::vector<Step> steps_;
    bool communicates_ = false;
};

}  // namespace vescale
