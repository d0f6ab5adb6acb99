// Random ops on DTensors without Python: kernels at the Python dispatch key, in front of PyTorch's own path.
//
// A call is looked up by the spec of its DTensor and by the integers among its arguments. On the first call, Python decides
// which part of the fill this rank draws, and how. Then the local tensor is filled with the numbers that one device would
// have there (random_parts.h). Everything else takes PyTorch's path, unchanged, and with it the handlers of vescale.rng:
// other tensor subclasses, modes, traced programs, other devices, fills that have no such rule.
//
// Tables are read and written with the interpreter's lock held, which is also their lock. The library is for one version of
// torch, which its file name contains.

#include "call.h"
#include "dtensor.h"
#include "random_parts.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <optional>
#include <string>
#include <unordered_map>

namespace vescale {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// Calls that each op remembers. Programs that make their specs anew for each call do not grow.
constexpr std::size_t kMaxKnown = 256;

// What Python has decided about calls with one key.
struct Recipe {
    py::object spec;  // keeps the address that is the key
    py::object mask_spec;  // native_dropout: of its mask
    std::shared_ptr<const Part> part;  // null: PyTorch's path
    std::vector<std::int64_t> sizes, strides;  // of the local tensor
    c10::ScalarType dtype = c10::ScalarType::Float;
};

// (op name, overload name, arguments, dtensor) -> None or a tuple, see `learn`.
py::object& decide() {
    static auto* made = new py::object;  // never destroyed: kernels outlive the interpreter
    return *made;
}

// (spec, op name, generator or None): called before numbers are drawn, outside of forwards and backwards of models.
py::object& tell_draw() {
    static auto* made = new py::object;  // as above
    return *made;
}

// How many forwards of models this thread is in.
int& num_forwards() {
    static thread_local int count = 0;
    return count;
}

// The recipes of one random op, by the spec of the DTensor and by integers.
class Recipes {
  public:
    explicit Recipes(c10::OperatorHandle fill) : fill_(std::move(fill)) {}

    // Null where PyTorch's path is to be taken. `arguments`: of the fill, without the tensor and the generator.
    std::shared_ptr<const Recipe> find(
        const std::string& op, const std::string& overload, PyObject* dtensor, c10::ArrayRef<IValue> arguments) {
        PyObject* spec = slot(dtensor, dtensor_class().spec_slot);
        if (spec == nullptr) {
            return nullptr;
        }
        Key key{reinterpret_cast<std::uint64_t>(spec)};
        for (const auto& value : arguments) {
            key.push_back(value.isInt() ? 2 : value.isNone() ? 1 : 0);
            if (value.isInt()) {
                key.push_back(static_cast<std::uint64_t>(value.toInt()));
            }
        }
        auto found = known_.find(key);
        if (found == known_.end()) {
            auto made = learn(op, overload, dtensor, arguments);
            if (known_.size() >= kMaxKnown) {
                known_.clear();
            }
            found = known_.emplace(std::move(key), std::move(made)).first;
        }
        const Recipe& recipe = *found->second;
        const at::Tensor& local = local_of(dtensor);
        // A DTensor may have got another local tensor since.
        if (!recipe.part || local.sizes() != recipe.sizes || local.strides() != recipe.strides ||
            local.scalar_type() != recipe.dtype || local.device().type() != c10::kCPU ||
            local.key_set().has_any(c10::python_ks) || !local.has_storage()) {
            return nullptr;
        }
        return found->second;
    }

    // Fills `local` by the native op. The interpreter's lock is held.
    void draw(
        const Recipe& recipe, const at::Tensor& local, c10::ArrayRef<IValue> arguments,
        const std::optional<at::Generator>& generator) const {
        const NativeFill native = [&](const at::Tensor& out, const at::Generator& draws) {
            static thread_local Stack kept;  // calls do not nest: native fills call nothing of ours
            Stack& stack = kept;
            stack.clear();
            stack.emplace_back(out);
            stack.insert(stack.end(), arguments.begin(), arguments.end());
            stack.emplace_back(draws);
            fill_.callBoxed(&stack);
            stack.clear();
        };
        if (num_forwards() == 0 && torch::autograd::get_current_graph_task_id() == -1) {
            tell_draw()(recipe.spec, fill_.schema().name(), generator.has_value() ? py::cast(*generator) : py::none());
        }
        const auto part = recipe.part;
        const auto& draws = generator.has_value() ? *generator : at::detail::getDefaultCPUGenerator();
        c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
        Unlocked unlocked(elements_of(local) > kLargeCall);
        fill_part(*part, local, draws, native);
        if (!local.is_inference() && !part->is_whole) {
            local.unsafeGetTensorImpl()->bump_version();
        }
    }

    void clear() { known_.clear(); }

  private:
    static std::shared_ptr<Recipe> learn(
        const std::string& op, const std::string& overload, PyObject* dtensor, c10::ArrayRef<IValue> arguments) {
        auto made = std::make_shared<Recipe>();
        made->spec = py::reinterpret_borrow<py::object>(slot(dtensor, dtensor_class().spec_slot));
        py::list values;
        for (const auto& value : arguments) {
            if (value.isInt()) {
                values.append(value.toInt());
            } else if (value.isDouble()) {
                values.append(value.toDouble());
            } else if (value.isNone()) {
                values.append(py::none());
            } else {
                return made;
            }
        }
        const py::object answer = decide()(op, overload, py::tuple(values), py::handle(dtensor));
        if (answer.is_none()) {
            return made;
        }
        const auto [is_whole, words, unit, numel, tail_word, final_word, boxes, mask_spec] =
            answer.cast<std::tuple<bool, int, int, std::int64_t, std::int64_t, std::uint64_t, py::list, py::object>>();
        auto part = std::make_shared<Part>();
        part->is_whole = is_whole;
        part->words = words;
        part->unit = unit;
        part->numel = numel;
        part->tail_word = tail_word;
        part->final_word = final_word;
        for (const auto& box : boxes) {
            std::vector<OwnedDim> dims;
            for (const auto& [row, runs] :
                 box.cast<std::vector<std::pair<std::int64_t, std::vector<std::pair<std::int64_t, std::int64_t>>>>>()) {
                OwnedDim dim{row, {}};
                for (const auto& [start, length] : runs) {
                    dim.runs.push_back({start, length});
                }
                dims.push_back(std::move(dim));
            }
            part->boxes.push_back(std::move(dims));
        }
        const at::Tensor& local = local_of(dtensor);
        made->part = std::move(part);
        made->sizes = local.sizes().vec();
        made->strides = local.strides().vec();
        made->dtype = local.scalar_type();
        made->mask_spec = mask_spec;
        return made;
    }

    using Known = std::unordered_map<Key, std::shared_ptr<const Recipe>, KeyHash>;

    c10::OperatorHandle fill_;
    Known& known_ = *new Known;  // never destroyed: PyTorch's tables, and kernels with them, outlive the interpreter
};

bool is_cpu(const IValue& generator) {
    return generator.isNone() || generator.toGenerator().device().type() == c10::kCPU;
}

std::optional<at::Generator> generator_in(const IValue& value) {
    return value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
}

// A kernel at the Python key, or above autograd. `run` returns whether it has replaced the arguments with the results.
class RandomKernel : public c10::OperatorKernel {
  public:
    RandomKernel(c10::OperatorHandle op, c10::OperatorHandle fill)
        : recipes_(std::move(fill)), name_(op.schema().name()), overload_(op.schema().overload_name()) {}

    void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
        if (!c10::impl::TorchDispatchModeTLS::any_modes_set()) {
            Gil gil;
            if (run(op, stack)) {
                return;
            }
        }
        pass_on(op, keys, stack);
    }

    void clear() { recipes_.clear(); }

  protected:
    virtual bool run(const c10::OperatorHandle& op, Stack* stack) = 0;

    virtual void pass_on(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { run_stock(op, stack); }

    // Null where PyTorch's path is to be taken. `arguments`: of the fill.
    std::shared_ptr<const Recipe> recipe_of(PyObject* dtensor, c10::ArrayRef<IValue> arguments) {
        return recipes_.find(name_, overload_, dtensor, arguments);
    }

    Recipes recipes_;

  private:
    std::string name_, overload_;
};

// A new DTensor like `source`, with another local tensor.
at::Tensor wrap_like(const at::Tensor& source, at::Tensor local, const py::object& spec) {
    return wrap(std::move(local), spec, source.sizes(), source.strides());
}

// normal_(self, mean, std, *, generator) and its like.
class InPlaceFill final : public RandomKernel {
    using RandomKernel::RandomKernel;

    bool run(const c10::OperatorHandle& op, Stack* stack) override {
        const auto count = op.schema().arguments().size();
        const auto given = torch::jit::last(*stack, count);
        PyObject* dtensor = dtensor_of(given[0].toTensor());
        const auto arguments = given.slice(1, count - 2);
        if (dtensor == nullptr || !is_cpu(given.back()) || are_writes_observed()) {
            return false;
        }
        const auto recipe = recipe_of(dtensor, arguments);
        if (recipe == nullptr) {
            return false;
        }
        const at::Tensor local = local_of(dtensor);
        recipes_.draw(*recipe, local, arguments, generator_in(given.back()));
        if (!local.is_inference()) {  // as other writes to DTensors (links.h)
            local.unsafeGetTensorImpl()->bump_version();
        }
        stack->resize(stack->size() - count + 1);
        return true;
    }
};

// rand_like and randn_like(self, *, dtype, layout, device, pin_memory, memory_format), by `fill` with (0, 1).
class Like final : public RandomKernel {
    using RandomKernel::RandomKernel;

    bool run(const c10::OperatorHandle& op, Stack* stack) override {
        const auto count = op.schema().arguments().size();
        const auto given = torch::jit::last(*stack, count);
        const at::Tensor& source = given[0].toTensor();
        PyObject* dtensor = dtensor_of(source);
        if (dtensor == nullptr || !source.is_contiguous()) {
            return false;
        }
        for (const auto i : c10::irange(std::size_t{1}, count)) {
            if (!given[i].isNone() && !is_same(op.schema().arguments()[i].name(), given[i], source)) {
                return false;
            }
        }
        const std::array<IValue, 2> arguments{0.0, 1.0};
        const auto recipe = recipe_of(dtensor, arguments);
        if (recipe == nullptr) {
            return false;
        }
        at::Tensor made;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            made = at::empty_like(local_of(dtensor));
        }
        recipes_.draw(*recipe, made, arguments, std::nullopt);
        IValue result = wrap_like(source, std::move(made), recipe->spec);
        torch::jit::drop(*stack, count);
        stack->push_back(std::move(result));
        return true;
    }

    // Whether an argument asks for what the source has anyway.
    static bool is_same(const std::string& name, const IValue& value, const at::Tensor& source) {
        if (name == "dtype") {
            return value.toScalarType() == source.scalar_type();
        }
        if (name == "memory_format") {
            return value.toMemoryFormat() == c10::MemoryFormat::Preserve ||
                value.toMemoryFormat() == c10::MemoryFormat::Contiguous;
        }
        return (name == "pin_memory" && !value.toBool()) || (name == "device" && value.toDevice() == source.device()) ||
            (name == "layout" && value.toLayout() == c10::kStrided);
    }
};

// Kernels of ops (input, p, train), which keep each element with probability 1 - p.
class DropoutKernel : public RandomKernel {
    using RandomKernel::RandomKernel;

  protected:
    // What is dropped out, by which recipe; null recipes take PyTorch's path.
    struct Call {
        at::Tensor source, local;
        double p = 0;
        std::array<IValue, 1> arguments;  // of bernoulli_
        std::shared_ptr<const Recipe> recipe;
    };

    Call call_of(Stack* stack) {
        const auto given = torch::jit::last(*stack, 3);
        Call call{given[0].toTensor(), {}, given[1].toDouble(), {}, nullptr};
        PyObject* dtensor = dtensor_of(call.source);
        if (dtensor != nullptr && call.source.numel() > 0 && call.source.is_contiguous() && call.p >= 0 && call.p < 1) {
            call.local = local_of(dtensor);
            call.arguments = {1.0 - call.p};
            call.recipe = recipe_of(dtensor, call.arguments);
        }
        return call;
    }
};

// As the native kernel on a CPU: the input times a boolean mask and the scale.
class NativeDropout final : public DropoutKernel {
    using DropoutKernel::DropoutKernel;

    bool run(const c10::OperatorHandle&, Stack* stack) override {
        const IValue& train = stack->back();
        if (train.isBool() && !train.toBool()) {
            return false;
        }
        const Call call = call_of(stack);
        if (call.recipe == nullptr) {
            return false;
        }
        at::Tensor mask, kept;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            mask = at::empty_like(call.local, call.local.options().dtype(c10::kBool));
            recipes_.draw(*call.recipe, mask, call.arguments, std::nullopt);
            kept = call.local.mul(mask).mul_(1.0 / (1.0 - call.p));
        }
        torch::jit::drop(*stack, 3);
        stack->push_back(wrap_like(call.source, std::move(kept), call.recipe->spec));
        stack->push_back(wrap_like(call.source, std::move(mask), call.recipe->mask_spec));
        return true;
    }
};

// On a CPU dropout is empty_like, bernoulli_, div_ and mul: here the first three are one op. It runs above autograd, at the
// key that only tensor subclasses have, so that mul is differentiated as usual.
class Dropout final : public DropoutKernel {
    using DropoutKernel::DropoutKernel;

    bool run(const c10::OperatorHandle&, Stack* stack) override {
        const auto given = torch::jit::last(*stack, 3);
        if (!given[2].toBool() || given[1].toDouble() == 0 || !at::isFloatingType(given[0].toTensor().scalar_type())) {
            return false;
        }
        const Call call = call_of(stack);
        if (call.recipe == nullptr) {
            return false;
        }
        const bool is_differentiable = call.source.requires_grad() && c10::GradMode::is_enabled();
        at::Tensor noise;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            noise = at::empty_like(call.local);
            recipes_.draw(*call.recipe, noise, call.arguments, std::nullopt);
            noise.div_(1.0 - call.p);
            if (!is_differentiable) {
                noise = call.local.mul(noise);
            }
        }
        at::Tensor result = wrap_like(call.source, std::move(noise), call.recipe->spec);
        if (is_differentiable) {
            result = at::mul(call.source, result);
        }
        torch::jit::drop(*stack, 3);
        stack->push_back(std::move(result));
        return true;
    }

    void pass_on(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) override {
        at::impl::MaybeSetTLSOnEntryGuard guard;
        op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::PythonTLSSnapshot), stack);
    }
};

Registration<RandomKernel>& registered() {
    static auto* made = new Registration<RandomKernel>;
    return *made;
}

template <class Kernel>
void put(const char* name, const char* overload, const char* fill, const char* fill_overload, DispatchKey key) {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto op = dispatcher.findSchema({name, overload});
    const auto native = dispatcher.findSchema({fill, fill_overload});
    if (!op.has_value() || !native.has_value()) {
        return;
    }
    registered().add(op->operator_name(), key, std::make_unique<Kernel>(*op, *native));
}

void install(
    const py::object& dtensor, const py::object& spec, const py::object& local, py::object native_part,
    py::object draws, std::vector<std::int32_t> exponents) {
    TORCH_CHECK(registered().handles.empty(), "the kernels of random ops are installed already");
    set_dtensor_class(dtensor, spec, local);
    decide() = std::move(native_part);
    tell_draw() = std::move(draws);
    characteristic_exponents() = std::move(exponents);
    const std::pair<const char*, const char*> fills[] = {
        {"aten::uniform_", ""},   {"aten::normal_", ""},     {"aten::exponential_", ""}, {"aten::cauchy_", ""},
        {"aten::geometric_", ""}, {"aten::log_normal_", ""}, {"aten::bernoulli_", "float"}, {"aten::random_", ""},
        {"aten::random_", "to"},  {"aten::random_", "from"}};
    for (const auto& [name, overload] : fills) {
        put<InPlaceFill>(name, overload, name, overload, DispatchKey::Python);
    }
    put<Like>("aten::rand_like", "", "aten::uniform_", "", DispatchKey::Python);
    put<Like>("aten::randn_like", "", "aten::normal_", "", DispatchKey::Python);
    put<NativeDropout>("aten::native_dropout", "", "aten::bernoulli_", "float", DispatchKey::Python);
    put<Dropout>("aten::dropout", "", "aten::bernoulli_", "float", DispatchKey::PythonTLSSnapshot);
}

void clear() {
    for (auto* kernel : registered().kernels) {
        kernel->clear();
    }
}

void uninstall() {
    clear();
    dtensor_class().type = nullptr;
    registered().remove_all();
    decide() = py::object();
    tell_draw() = py::object();
}

}  // namespace
}  // namespace vescale

PYBIND11_MODULE(_random_fills, module) {
    module.def("install", &vescale::install);
    module.def("uninstall", &vescale::uninstall);
    module.def("clear", &vescale::clear);
    module.def("count_forward", [](int change) { vescale::num_forwards() += change; });
    module.def("observe_writes", &vescale::observe_writes);
}
