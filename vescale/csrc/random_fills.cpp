// Random ops on DTensors without Python: kernels at the Python dispatch key, in front of PyTorch's own path.
//
// A call is looked up by the spec of its DTensor and by the integers among its arguments. On the first call, Python decides
// which part of the fill this rank draws, and how. Then the local tensor is filled with the numbers that one device would
// have there (random_parts.h). Everything else takes PyTorch's path, unchanged, and with it the handlers of vescale.rng:
// other tensor subclasses, modes, traced programs, other devices, fills that have no such rule.
//
// Tables are read and written with the interpreter's lock held, which is also their lock. The library is for one build of
// torch: setup.py passes its name.

#include <torch/csrc/python_headers.h>

#include <structmember.h>

#include "random_parts.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

namespace vescale {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// Local tensors with more elements are filled without the interpreter's lock.
constexpr std::int64_t kLargeFill = 1 << 14;
// Calls that each op remembers. Programs that make their specs anew for each call do not grow.
constexpr std::size_t kMaxKnown = 256;

// Keys above Python's: what runs below must not enter autograd, autocast or functorch again.
const DispatchKeySet kAbovePython = DispatchKeySet(DispatchKeySet::FULL) ^
    (DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python) | DispatchKeySet(DispatchKey::Python));

class Gil {
  public:
    Gil() : state_(PyGILState_Ensure()) {}
    ~Gil() { PyGILState_Release(state_); }
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

  private:
    PyGILState_STATE state_;
};

// The interpreter's lock, given up for a scope if `is_wanted`.
class Unlocked {
  public:
    explicit Unlocked(bool is_wanted) : state_(is_wanted ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_ != nullptr) {
            PyEval_RestoreThread(state_);
        }
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

// What Python has decided about calls with one key.
struct Recipe {
    py::object spec;  // keeps the address that is the key
    py::object mask_spec;  // native_dropout: of its mask
    std::shared_ptr<const Part> part;  // null: PyTorch's path
    std::vector<std::int64_t> sizes, strides;  // of the local tensor
    c10::ScalarType dtype = c10::ScalarType::Float;
};

using Key = c10::SmallVector<std::uint64_t, 8>;

struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
        std::uint64_t hash = 0x9e3779b97f4a7c15ULL ^ key.size();
        for (const auto word : key) {
            hash = (hash ^ word) * 0xff51afd7ed558ccdULL;
            hash ^= hash >> 32;
        }
        return hash;
    }
};

struct Shared {
    PyTypeObject* dtensor = nullptr;
    Py_ssize_t spec_slot = 0;
    Py_ssize_t local_slot = 0;
    py::object recipe;  // (op name, overload name, arguments, dtensor) -> None or a tuple, see `learn`
    py::object hooks;   // by part; those of "models" have `view_copies`, not empty while writes to DTensors are followed
    py::object models, view_copies;  // these names
};

Shared& self() {
    static auto* made = new Shared;  // never destroyed: tensors may die after static objects
    return *made;
}

PyObject*& slot(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// The Python object of an exact DTensor, or null.
PyObject* dtensor_of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->key_set().has(DispatchKey::Python)) {
        return nullptr;
    }
    PyObject* object = impl->pyobj_slot()->load_pyobj();
    return object != nullptr && Py_TYPE(object) == self().dtensor ? object : nullptr;
}

at::Tensor wrap(at::Tensor local, py::handle spec, const at::Tensor& like) {
    auto keys = DispatchKeySet({local.options().computeDispatchKey()});
    c10::Storage storage(
        c10::Storage::use_byte_size_t{},
        at::detail::computeStorageNbytes(like.sizes(), like.strides(), local.dtype().itemsize()),
        at::DataPtr{nullptr, local.device()},
        c10::GetAllocator(c10::kMeta),
        /*resizable=*/true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, local.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides());
    impl->set_python_dispatch(true);
    auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor, self().dtensor));
    if (!object) {
        throw python_error();
    }
    slot(object.ptr(), self().local_slot) = THPVariable_Wrap(std::move(local));
    slot(object.ptr(), self().spec_slot) = spec.inc_ref().ptr();
    return tensor;
}

void stock(const c10::OperatorHandle& op, Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
    (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

// The recipes of one random op, by the spec of the DTensor and by integers.
class Recipes {
  public:
    explicit Recipes(c10::OperatorHandle fill) : fill_(std::move(fill)) {}

    // Null where PyTorch's path is to be taken. `arguments`: of the fill, without the tensor and the generator.
    std::shared_ptr<const Recipe> find(
        const std::string& op, const std::string& overload, PyObject* dtensor, c10::ArrayRef<IValue> arguments) {
        PyObject* spec = slot(dtensor, self().spec_slot);
        PyObject* held = slot(dtensor, self().local_slot);
        if (spec == nullptr || held == nullptr) {
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
        const at::Tensor& local = THPVariable_Unpack(held);
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
        const auto part = recipe.part;
        const auto& draws = generator.has_value() ? *generator : at::detail::getDefaultCPUGenerator();
        c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
        Unlocked unlocked(local.numel() > kLargeFill);
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
        made->spec = py::reinterpret_borrow<py::object>(slot(dtensor, self().spec_slot));
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
        const py::object answer = self().recipe(op, overload, py::tuple(values), py::handle(dtensor));
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
        const at::Tensor& local = THPVariable_Unpack(slot(dtensor, self().local_slot));
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

// Whether somebody is told of writes to DTensors, which only PyTorch's path does.
bool is_watched() {
    PyObject* models = PyDict_GetItemWithError(self().hooks.ptr(), self().models.ptr());
    if (models == nullptr) {
        return false;
    }
    const auto copies = py::reinterpret_steal<py::object>(PyObject_GetAttr(models, self().view_copies.ptr()));
    return !copies || PyObject_Size(copies.ptr()) > 0;
}

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
        : name_(op.schema().name()), overload_(op.schema().overload_name()), recipes_(std::move(fill)) {}

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

    virtual void pass_on(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { stock(op, stack); }

    std::string name_, overload_;
    Recipes recipes_;
};

// normal_(self, mean, std, *, generator) and its like.
class InPlaceFill final : public RandomKernel {
    using RandomKernel::RandomKernel;

    bool run(const c10::OperatorHandle& op, Stack* stack) override {
        const auto count = op.schema().arguments().size();
        const auto given = torch::jit::last(*stack, count);
        PyObject* dtensor = dtensor_of(given[0].toTensor());
        const auto arguments = given.slice(1, count - 2);
        if (dtensor == nullptr || !is_cpu(given.back()) || is_watched()) {
            return false;
        }
        const auto recipe = recipes_.find(name_, overload_, dtensor, arguments);
        if (recipe == nullptr) {
            return false;
        }
        const at::Tensor local = THPVariable_Unpack(slot(dtensor, self().local_slot));
        recipes_.draw(*recipe, local, arguments, generator_in(given.back()));
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
        const auto recipe = recipes_.find(name_, overload_, dtensor, arguments);
        if (recipe == nullptr) {
            return false;
        }
        at::Tensor made;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            made = at::empty_like(THPVariable_Unpack(slot(dtensor, self().local_slot)));
        }
        recipes_.draw(*recipe, made, arguments, std::nullopt);
        IValue result = wrap(std::move(made), recipe->spec, source);
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

// native_dropout(input, p, train): as the native kernel on a CPU, the input times a boolean mask and the scale.
class NativeDropout final : public RandomKernel {
    using RandomKernel::RandomKernel;

    bool run(const c10::OperatorHandle& op, Stack* stack) override {
        const auto given = torch::jit::last(*stack, 3);
        const at::Tensor& source = given[0].toTensor();
        PyObject* dtensor = dtensor_of(source);
        const double p = given[1].toDouble();
        if (dtensor == nullptr || (given[2].isBool() && !given[2].toBool()) || source.numel() == 0 ||
            !source.is_contiguous() || !(p >= 0 && p < 1)) {
            return false;
        }
        const std::array<IValue, 1> arguments{1.0 - p};
        const auto recipe = recipes_.find(name_, overload_, dtensor, arguments);
        if (recipe == nullptr) {
            return false;
        }
        const at::Tensor local = THPVariable_Unpack(slot(dtensor, self().local_slot));
        at::Tensor mask, kept;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            mask = at::empty_like(local, local.options().dtype(c10::kBool));
            recipes_.draw(*recipe, mask, arguments, std::nullopt);
            kept = local.mul(mask).mul_(1.0 / (1.0 - p));
        }
        IValue results[] = {wrap(std::move(kept), recipe->spec, source), wrap(std::move(mask), recipe->mask_spec, source)};
        torch::jit::drop(*stack, 3);
        stack->push_back(std::move(results[0]));
        stack->push_back(std::move(results[1]));
        return true;
    }
};

// dropout(input, p, train), which on a CPU is empty_like, bernoulli_, div_ and mul: here the first three are one op. It runs
// above autograd, at the key that only tensor subclasses have, so that mul is differentiated as usual.
class Dropout final : public RandomKernel {
    using RandomKernel::RandomKernel;

    bool run(const c10::OperatorHandle& op, Stack* stack) override {
        const auto given = torch::jit::last(*stack, 3);
        const at::Tensor& source = given[0].toTensor();
        PyObject* dtensor = dtensor_of(source);
        const double p = given[1].toDouble();
        if (dtensor == nullptr || !given[2].toBool() || source.numel() == 0 || !source.is_contiguous() ||
            !(p > 0 && p < 1) || !at::isFloatingType(source.scalar_type())) {
            return false;
        }
        const std::array<IValue, 1> arguments{1.0 - p};
        const auto recipe = recipes_.find(name_, overload_, dtensor, arguments);
        if (recipe == nullptr) {
            return false;
        }
        const at::Tensor local = THPVariable_Unpack(slot(dtensor, self().local_slot));
        at::Tensor noise;
        {
            c10::impl::ExcludeDispatchKeyGuard guard(kAbovePython);
            noise = at::empty_like(local);
            recipes_.draw(*recipe, noise, arguments, std::nullopt);
            noise.div_(1.0 - p);
            if (!source.requires_grad() || !c10::GradMode::is_enabled()) {
                noise = local.mul(noise);
            }
        }
        at::Tensor result = wrap(std::move(noise), recipe->spec, source);
        if (source.requires_grad() && c10::GradMode::is_enabled()) {
            result = at::mul(source, result);
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

struct Registration {
    std::vector<RandomKernel*> kernels;  // owned by the dispatcher's table
    std::vector<c10::RegistrationHandleRAII> handles;
};

Registration& registered() {
    static auto* made = new Registration;
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
    auto kernel = std::make_unique<Kernel>(*op, *native);
    auto& all = registered();
    all.kernels.push_back(kernel.get());
    all.handles.push_back(dispatcher.registerImpl(
        op->operator_name(), key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)), std::nullopt, nullptr,
        "vescale"));
}

Py_ssize_t offset_of(const py::object& member) {
    TORCH_CHECK_TYPE(Py_TYPE(member.ptr()) == &PyMemberDescr_Type, "expected the descriptor of a slot");
    return reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset;
}

void install(
    const py::object& dtensor, const py::object& spec, const py::object& local, py::object recipe, py::object hooks,
    std::vector<std::int32_t> exponents) {
    auto& our = self();
    TORCH_CHECK(registered().handles.empty(), "the kernels of random ops are installed already");
    our.dtensor = reinterpret_cast<PyTypeObject*>(dtensor.ptr());
    our.spec_slot = offset_of(spec);
    our.local_slot = offset_of(local);
    our.recipe = std::move(recipe);
    our.hooks = std::move(hooks);
    our.models = py::reinterpret_steal<py::object>(PyUnicode_InternFromString("models"));
    our.view_copies = py::reinterpret_steal<py::object>(PyUnicode_InternFromString("view_copies"));
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
    auto& all = registered();
    all.kernels.clear();
    all.handles.clear();
    self().recipe = py::object();
    self().hooks = py::object();
}

}  // namespace
}  // namespace vescale

PYBIND11_MODULE(_random_fills, module) {
    module.attr("torch_version") = VESCALE_TORCH_VERSION;
    module.def("install", &vescale::install);
    module.def("uninstall", &vescale::uninstall);
    module.def("clear", &vescale::clear);
}
