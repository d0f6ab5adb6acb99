// The kernel of one op at the Python dispatch key.

#pragma once

#include "dispatch.h"
#include "links.h"
#include "mixed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

namespace vescale {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

class Kernel final : public c10::OperatorKernel {
  public:
    // `written`: positions of the arguments that the op writes to. `views`: its results are views of the first argument.
    Kernel(std::string name, std::vector<std::size_t> written, bool views)
        : name_(std::move(name)), written_(std::move(written)), views_(views) {}

    void operator()(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
        // Views of tensors from outside of inference mode have their versions; what is made in that mode has none.
        std::optional<c10::InferenceMode> outside;
        if (views_ && c10::InferenceMode::is_enabled() &&
            has_version(torch::jit::peek(*stack, 0, op.schema().arguments().size()))) {
            outside.emplace(false);  // restores all that it sets
            c10::GradMode::set_enabled(false);
        }
        if (!is_active.load(std::memory_order_relaxed) || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
            WatchCalls::note_other();
            {
                Gil gil;
                require_current_operands(op, stack);
            }
            return run_by_stock(op, stack);
        }
        const char* reason = nullptr;
        {
            Gil gil;
            if (try_run(op, stack, reason)) {
                return;
            }
            require_current_operands(op, stack);  // making the key may have stopped halfway
            if ((reason == kPlainTensor || reason == kUnknownSpec || reason == kViewedCopies) && run_mixed(op, stack)) {
                return WatchCalls::note_other();
            }
        }
        WatchCalls::note_other();
        const double start = seconds_now();
        run_by_stock(op, stack);
        Gil gil;
        auto& [calls, seconds] = counts_.stock[reason];
        calls += 1;
        seconds += seconds_now() - start;
    }

    const std::string& name() const { return name_; }
    const Counts& counts() const { return counts_; }
    void reset_counts() { counts_ = {}; }
    void clear() {
        retire(entries_);
        knows_compared_ = false;  // the vector stays as it is: a key may be in the making
    }

  private:
    static bool has_version(const IValue& viewed) {
        return viewed.isTensor() && viewed.toTensor().defined() && !viewed.toTensor().is_inference();
    }

    bool try_run(const c10::OperatorHandle& op, Stack* stack, const char*& reason);
    const char* make_key(c10::ArrayRef<IValue> arguments, Key& key) const;
    void run_by_stock(const c10::OperatorHandle& op, Stack* stack) const;
    Entry learn(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments);
    void run(const c10::OperatorHandle& op, Stack* stack, const Entry& entry);
    void compare_arguments(const c10::OperatorHandle& op);

    std::string name_;
    std::vector<std::size_t> written_;
    bool views_;
    std::vector<bool> is_compared_;  // for each argument: by value; otherwise by type only
    bool knows_compared_ = false;
    EntryTable entries_;
    Counts counts_;
};

// Words of a key: a tag for the type of an argument, and its value.
enum Tag : std::uint64_t {
    kNone = 1,
    kDTensor,
    kScalarTensor,
    kTensors,
    kInt,
    kDouble,
    kBool,
    kInts,
    kBools,
    kDevice,
    kText,
    kAnyInt,  // a number that does not decide by its value
    kAnyDouble,
};

// The key of a call, or the reason why it has none.
inline const char* Kernel::make_key(c10::ArrayRef<IValue> arguments, Key& key) const {
    bool has_dtensor = false;
    const auto add_tensor = [&](const at::Tensor& tensor, bool is_written) -> const char* {
        if (!tensor.defined()) {
            key.push_back(kNone);
            return nullptr;
        }
        if (PyObject* dtensor = dtensor_of(tensor)) {
            const Spec* spec = spec_of(dtensor);
            if (spec == nullptr) {
                return kUnknownSpec;  // plain tensors may come after
            }
            require_current(local_of(dtensor));
            has_dtensor = true;
            key.push_back(kDTensor);
            key.push_back(reinterpret_cast<std::uint64_t>(spec));
            return nullptr;
        }
        if (tensor.key_set().has(DispatchKey::Python)) {
            return "tensor subclass";
        }
        if (tensor.dim() != 0 || is_written || (at::GradMode::is_enabled() && tensor.requires_grad())) {
            return kPlainTensor;
        }
        key.push_back(kScalarTensor);
        key.push_back(
            (static_cast<std::uint64_t>(tensor.scalar_type()) << 16) |
            (static_cast<std::uint64_t>(tensor.device().type()) << 8) |
            static_cast<std::uint64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()));
        return nullptr;
    };
    for (const auto i : c10::irange(arguments.size())) {
        const IValue& value = arguments[i];
        const bool is_compared = is_compared_[i];
        if (value.isTensor()) {
            const bool is_written = std::find(written_.begin(), written_.end(), i) != written_.end();
            if (const char* reason = add_tensor(value.toTensor(), is_written)) {
                return reason;
            }
        } else if (value.isInt()) {
            key.push_back(is_compared ? kInt : kAnyInt);
            if (is_compared) {
                key.push_back(static_cast<std::uint64_t>(value.toInt()));
            }
        } else if (value.isDouble()) {
            key.push_back(is_compared ? kDouble : kAnyDouble);
            if (is_compared) {
                std::uint64_t word;
                const double number = value.toDouble();
                std::memcpy(&word, &number, sizeof word);
                key.push_back(word);
            }
        } else if (value.isBool()) {
            key.push_back(kBool);
            key.push_back(value.toBool());
        } else if (value.isNone()) {
            key.push_back(kNone);
        } else if (value.isIntList()) {
            const auto list = value.toIntVector();
            key.push_back(kInts);
            key.push_back(list.size());
            key.append(list.begin(), list.end());
        } else if (value.isTensorList()) {
            const auto list = value.toListRef();
            key.push_back(kTensors);
            key.push_back(list.size());
            for (const c10::IValue& item : list) {
                if (const char* reason = add_tensor(item.toTensor(), false)) {
                    return reason;
                }
            }
        } else if (value.isBoolList()) {
            const auto list = value.toBoolList();
            key.push_back(kBools);
            key.push_back(list.size());
            for (const bool item : list) {
                key.push_back(item);
            }
        } else if (value.isDoubleList() && !is_compared) {
            key.push_back(kAnyDouble);
            key.push_back(value.toDoubleList().size());
        } else if (value.isDevice()) {
            const auto device = value.toDevice();
            key.push_back(kDevice);
            key.push_back(static_cast<std::uint64_t>(device.type()) << 8 | static_cast<std::uint8_t>(device.index()));
        } else if (value.isString()) {
            const auto text = value.toStringView();
            key.push_back(kText);
            key.push_back(text.size());
            key.append(text.begin(), text.end());
        } else {
            return has_plain_tensor(value) ? kPlainTensor : "argument type";
        }
    }
    return has_dtensor ? nullptr : "no DTensor";
}

// The op by PyTorch's path, which does not count writes to local tensors, and gives views of these versions of their own.
inline void Kernel::run_by_stock(const c10::OperatorHandle& op, Stack* stack) const {
    if (written_.empty() && !views_) {
        return run_stock(op, stack);
    }
    c10::SmallVector<at::Tensor, 2> operands;
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const auto add = [&](const IValue& value) {
        if (value.isTensor()) {
            operands.push_back(value.toTensor());
        } else if (value.isTensorList()) {
            for (const c10::IValue& item : value.toListRef()) {
                operands.push_back(item.toTensor());
            }
        }
    };
    if (views_) {
        add(arguments[0]);
    }
    for (const auto i : written_) {
        add(arguments[i]);
    }
    run_stock(op, stack);
    if (dtensor_class().type == nullptr) {
        return;
    }
    Gil gil;
    for (const at::Tensor& operand : operands) {
        PyObject* dtensor = operand.defined() ? dtensor_of(operand) : nullptr;
        if (dtensor == nullptr) {
            continue;
        }
        if (!written_.empty()) {
            count_write(local_of(dtensor));
            continue;
        }
        const IValue& result = stack->back();
        if (result.isTensor()) {
            share_local_version(result.toTensor(), local_of(dtensor));
        } else if (result.isTensorList()) {
            for (const c10::IValue& part : result.toListRef()) {
                share_local_version(part.toTensor(), local_of(dtensor));
            }
        }
    }
}

inline bool Kernel::try_run(const c10::OperatorHandle& op, Stack* stack, const char*& reason) {
    auto& our = self();
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    if (!written_.empty() && are_writes_observed()) {
        reason = kViewedCopies;
        return false;
    }
    if (!knows_compared_) {
        compare_arguments(op);
    }
    Key key;
    const auto epoch = our.epoch;
    reason = make_key(arguments, key);
    if (reason == nullptr && epoch != our.epoch) {  // a new spec filled the table: the key holds specs that have gone
        reason = "full table";
    }
    if (reason != nullptr) {
        return false;
    }
    auto found = entries_.find(key);
    if (found == entries_.end()) {
        const double start = seconds_now();
        Entry entry = learn(op, arguments);
        counts_.misses += 1;
        counts_.seconds_of_misses += seconds_now() - start;
        if (epoch != our.epoch) {  // what the entry rests on has changed meanwhile
            reason = "changed rules";
            return false;
        }
        if (our.num_entries >= our.max_entries) {
            owned(PyObject_CallNoArgs(our.forget.ptr()));
            reason = "full table";
            return false;
        }
        found = entries_.emplace(std::move(key), std::move(entry)).first;
        our.num_entries += 1;
    } else if (!found->second.is_stock) {
        counts_.hits += 1;
    }
    if (found->second.is_stock) {
        reason = "decision";
        return false;
    }
    const Running running;
    run(op, stack, found->second);
    return true;
}

// Dims of size 1 may have any stride, and kernels tell memory formats by strides: they get those of the whole tensor, by
// which PyTorch has decided.
inline void take_strides_of_whole(const at::Tensor& local, const at::Tensor& whole) {
    const auto num_dims = local.dim();
    if (num_dims != whole.dim() || local.layout() != at::kStrided) {
        return;
    }
    for (const auto i : c10::irange(num_dims)) {
        if (local.size(i) == 1 && local.stride(i) != whole.stride(i) && whole.stride(i) > 0) {
            auto strides = local.strides().vec();
            for (const auto k : c10::irange(num_dims)) {
                strides[k] = local.size(k) == 1 && whole.stride(k) > 0 ? whole.stride(k) : strides[k];
            }
            const std::vector<std::int64_t> sizes = local.sizes().vec();
            local.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, local.storage_offset());
            return;
        }
    }
}

inline void Kernel::run(const c10::OperatorHandle& op, Stack* stack, const Entry& known) {
    const auto& schema = op.schema();
    const auto num_arguments = schema.arguments().size();
    const auto first = stack->size() - num_arguments;
    c10::SmallVector<std::pair<std::size_t, at::Tensor>, 6> wrappers;
    std::int64_t numel = 0;
    for (const auto i : c10::irange(num_arguments)) {
        IValue& value = (*stack)[first + i];
        if (value.isTensor()) {
            const at::Tensor& tensor = value.toTensor();
            PyObject* dtensor = tensor.defined() ? dtensor_of(tensor) : nullptr;
            if (dtensor != nullptr) {
                const at::Tensor& local = local_of(dtensor);
                numel += elements_of(local);
                wrappers.emplace_back(i, std::move(value).toTensor());
                value = local;
            }
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> locals;
            const auto list = value.toListRef();
            locals.reserve(list.size());
            for (const c10::IValue& item : list) {
                const at::Tensor& tensor = item.toTensor();
                PyObject* dtensor = dtensor_of(tensor);
                locals.push_back(dtensor == nullptr ? tensor : local_of(dtensor));
                numel += elements_of(locals.get(locals.size() - 1));
                wrappers.emplace_back(i, tensor);
            }
            value = std::move(locals);
        }
    }
    for (const auto& [index, value] : known.replaced) {
        (*stack)[first + index] = value;
    }
    const auto wrapper_of = [&](int index) -> const at::Tensor& {
        for (const auto& [i, tensor] : wrappers) {
            if (static_cast<int>(i) == index) {
                return tensor;
            }
        }
        TORCH_INTERNAL_ASSERT(false, "no tensor at argument ", index);
    };
    for (const auto& part : known.parts) {
        const c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
        IValue& value = (*stack)[first + part[0]];
        value = part_of(value.toTensor(), part);
        WatchCalls::note_part(wrapper_of(part[0]), part);
    }
    {
        c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
        Unlocked unlocked(numel > kLargeCall);
        op.callBoxed(stack);
    }
    for (const auto i : written_) {
        for (const auto& [position, tensor] : wrappers) {
            PyObject* dtensor = position == i ? dtensor_of(tensor) : nullptr;  // lists hold plain tensors, too: steps
            if (dtensor != nullptr) {
                count_write(local_of(dtensor));
            }
        }
    }
    const auto base = stack->size() - known.results.size();
    for (const auto i : c10::irange(known.results.size())) {
        const Result& result = known.results[i];
        IValue& value = (*stack)[base + i];
        const auto wrap_one = [&](at::Tensor local, const Spec* spec) {
            if (spec == nullptr || !local.defined()) {
                return local;
            }
            if (PyObject* viewed = views_ && !wrappers.empty() ? dtensor_of(wrappers[0].second) : nullptr) {
                share_version(local, local_of(viewed));
            }
            at::Tensor made = wrap(local, *spec);
            take_strides_of_whole(local, made);
            if (result.viewed >= 0) {
                made.unsafeGetTensorImpl()->set_storage_keep_dtype(wrapper_of(result.viewed).storage());
            }
            return made;
        };
        if (result.written >= 0) {
            value = wrapper_of(result.written);
        } else if (value.isTensor()) {
            value = wrap_one(std::move(value).toTensor(), result.specs[0]);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> made;
            const auto list = value.toTensorList();
            for (const auto k : c10::irange(list.size())) {
                made.push_back(wrap_one(list.get(k), result.specs[k]));
            }
            value = std::move(made);
        }
    }
}

// Asks Python what runs. Errors of the op are not reported here: PyTorch's path raises them.
inline Entry Kernel::learn(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
    using Results = std::vector<std::tuple<py::tuple, int, int>>;  // specs, written, viewed
    using Replaced = std::vector<std::pair<int, std::vector<std::int64_t>>>;  // position, sizes
    Entry entry;
    const WatchCalls unrelated;
    struct Restore {
        bool other = WatchCalls::has_other();
        ~Restore() { WatchCalls::has_other() = other; }
    } const restore;
    const auto [args, kwargs] = to_python(op.schema(), arguments);
    const py::object decision = self().decide(op.schema().name(), op.schema().overload_name(), args, kwargs);
    if (decision.is_none()) {
        return entry;
    }
    auto [results, replaced, parts] = decision.cast<std::tuple<Results, Replaced, std::vector<Part>>>();
    for (const auto& [specs, written, viewed] : results) {
        Result result{{}, written, viewed};
        for (const auto& spec : specs) {
            result.specs.push_back(spec.is_none() ? nullptr : add_spec(spec.ptr()));
        }
        entry.results.push_back(std::move(result));
    }
    for (auto& [position, sizes] : replaced) {
        entry.replaced.emplace_back(position, IValue(std::move(sizes)));
    }
    entry.parts = std::move(parts);
    entry.is_stock = false;
    return entry;
}

// Numbers decide nothing unless PyTorch says that they do: a scale, an exponent, a step's size.
inline void Kernel::compare_arguments(const c10::OperatorHandle& op) {
    const auto& declared = op.schema().arguments();
    const auto is_static =
        self().static_arguments(op.schema().name(), op.schema().overload_name()).cast<std::vector<bool>>();
    is_compared_.resize(declared.size());
    for (const auto i : c10::irange(declared.size())) {
        const auto text = declared[i].type()->str();
        const bool is_number = text.find("float") != std::string::npos || text.find("Scalar") != std::string::npos ||
            text.find("number") != std::string::npos;
        is_compared_[i] = is_static[i] || !is_number;
    }
    knows_compared_ = true;
}

}  // namespace vescale
