// The cursor of a recorded step: a function mode that compares each torch function of a forward with the one that was recorded
// at its place, and does on local tensors what was found out about that one.
//
// vescale/static/tape makes the entries, and says what each of them compares and does.

#include "interpreter.h"
#include "no_torch_function.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>


#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace vescale {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using Numbers = c10::SmallVector<std::int64_t, 16>;

// What an argument has to be: the tags of vescale/static/_record.py.
enum class Kind : int { kValue = 0, kPlain, kInt, kFloat, kSame, kEqual, kSequence, kDict, kSlice, kView };

struct Expected {
    Kind kind = Kind::kValue;
    std::int64_t number = 0;  // of a value; dims of a plain tensor
    std::int64_t base = 0;  // of a view: which value it is the whole of
    py::object object;  // the object itself, or a weak reference to it; the type of a sequence; names of a dictionary; of a whole number, its type
    bool requires_grad = false;
    std::vector<Expected> items;

    static Expected of(const py::handle& given) {
        const Nested nested;
        const auto parts = given.cast<py::tuple>();
        Expected made;
        const int kind = parts[0].cast<int>();
        TORCH_CHECK_VALUE(kind >= 0 && kind <= static_cast<int>(Kind::kView), "no kind of an argument: ", kind);
        made.kind = static_cast<Kind>(kind);
        switch (made.kind) {
            case Kind::kValue:
                made.number = parts[1].cast<std::int64_t>();
                break;
            case Kind::kView:
                made.number = parts[1].cast<std::int64_t>();
                made.base = parts[2].cast<std::int64_t>();
                break;
            case Kind::kPlain:
                made.object = parts[1];
                made.number = parts[2].cast<std::int64_t>();
                made.requires_grad = parts[3].cast<bool>();
                break;
            case Kind::kFloat:
                break;
            case Kind::kInt:
            case Kind::kSame:
            case Kind::kEqual:
                made.object = parts[1];
                break;
            case Kind::kSequence:
            case Kind::kDict:
            case Kind::kSlice:
                made.object = parts[1];
                for (const auto item : parts[2].cast<py::tuple>()) {
                    made.items.push_back(of(item));
                }
                made.check_items();
                break;
        }
        return made;
    }

  private:
    void check_items() const {
        const auto is_sequence = [](PyObject* type) {
            return PyType_Check(type) &&
                PyType_FastSubclass(reinterpret_cast<PyTypeObject*>(type), Py_TPFLAGS_TUPLE_SUBCLASS | Py_TPFLAGS_LIST_SUBCLASS);
        };
        TORCH_CHECK_VALUE(
            kind == Kind::kSlice          ? items.size() == 3
                : kind == Kind::kSequence ? is_sequence(object.ptr())
                                          : PyTuple_Check(object.ptr()) &&
                        PyTuple_GET_SIZE(object.ptr()) == static_cast<Py_ssize_t>(items.size()),
            "no description of an argument");
    }
};

enum class Action : int { kLocal = 0, kReadSizes, kTakeSizes, kPython };
enum class Reader : int { kShape = 0, kSize, kLength, kCount };
// Numbers among the arguments: all are as good as the recorded ones; others have to be checked; others with these sizes of
// tensors have to be.
enum class Check : int { kNothing = 0, kNumbers, kSizes };

struct Settings {
    bool gradients, inference, autocast_cpu, autocast_gpu;
    std::int64_t dispatch_modes, saved_tensors_hooks;  // how many are on

    static Settings now() {
        return {c10::GradMode::is_enabled(), c10::InferenceMode::is_enabled(), at::autocast::is_autocast_enabled(at::kCPU),
                at::autocast::is_autocast_enabled(at::kCUDA), c10::impl::TorchDispatchModeTLS::stack_len(),
                static_cast<std::int64_t>(at::SavedTensorDefaultHooks::get_tls_state().stack.size())};
    }
    bool operator==(const Settings&) const = default;
};

// What of a tensor decides how it broadcasts: which of its sizes are 1.
std::int64_t ones_of(const at::Tensor& tensor) {
    std::int64_t found = 1;
    for (const auto size : tensor.sizes()) {
        found = (found << 1) | (size == 1 ? 1 : 0);
    }
    return found;
}

struct Entry {
    py::object function;
    std::vector<Expected> args;
    std::vector<std::pair<py::object, Expected>> kwargs;
    Settings settings;
    Action action;
    Reader reader = Reader::kShape;
    Numbers factors;
    py::object callable;  // (function, args, kwargs) -> result
    Check check;
    py::object accept;  // (function, args, kwargs): raises where the entry cannot do this
    mutable std::pair<Numbers, py::object> known_size;  // the last whole sizes
    mutable std::vector<Numbers> accepted;  // the last ones first
    std::vector<std::int64_t> results;  // numbers of the tensors that it returns
    std::vector<std::pair<std::int64_t, std::int64_t>> writes;  // which tensor among the arguments becomes which value
    bool may_be_missing = false;  // no later entry takes what it returns
};

// `tensors_in` of vescale.compat, for containers of unknown types.
py::object& tensors_in() {
    static auto* found = new py::object;
    return *found;
}

const py::object& size_type() {
    static auto* found = new py::object(py::module_::import("torch").attr("Size"));
    return *found;
}

// The tensors of an argument or a result, in order.
template <class See>
void see_tensors(PyObject* object, const See& see) {
    if (THPVariable_Check(object)) {
        see(object);
    } else if (PyTuple_Check(object) || PyList_CheckExact(object)) {
        const Nested nested;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
            see_tensors(PySequence_Fast_GET_ITEM(object, i), see);
        }
    } else if (PyDict_CheckExact(object)) {
        const Nested nested;
        Py_ssize_t position = 0;
        PyObject* value = nullptr;
        while (PyDict_Next(object, &position, nullptr, &value)) {
            see_tensors(value, see);
        }
    } else if (
        object != Py_None && !PyBool_Check(object) && !PyLong_CheckExact(object) && !PyFloat_CheckExact(object) &&
        !PyUnicode_CheckExact(object) && !PySlice_Check(object)) {
        require(tensors_in());
        for (const auto found : owned(PySequence_List(owned(PyObject_CallOneArg(tensors_in().ptr(), object)).ptr()))) {
            tensor_of(found);
            see(found.ptr());
        }
    }
}

void set_tensors_in(py::object function) {
    tensors_in() = std::move(function);
}

constexpr std::int64_t kMaxValues = std::int64_t{1} << 24;

class Tape {
  public:
    void add(const py::object& function, const py::tuple& args, const py::dict& kwargs, const py::tuple& settings, int action,
             int reader, const py::tuple& factors, py::object callable, int check, py::object accept,
             const py::object& numbers, const py::tuple& results, const py::tuple& writes) {
        TORCH_CHECK_VALUE(
            action >= 0 && action <= static_cast<int>(Action::kPython) && reader >= 0 &&
                reader <= static_cast<int>(Reader::kCount) && check >= 0 && check <= static_cast<int>(Check::kSizes),
            "no action, reader or check");
        Entry made;
        made.function = function;
        for (const auto item : args) {
            made.args.push_back(Expected::of(item));
        }
        for (const auto& [name, item] : kwargs) {
            made.kwargs.emplace_back(py::reinterpret_borrow<py::object>(name), Expected::of(item));
            TORCH_CHECK_TYPE(PyUnicode_Check(name.ptr()), "expected names of arguments");
        }
        made.settings = {settings[0].cast<bool>(), settings[1].cast<bool>(), settings[2].cast<bool>(), settings[3].cast<bool>(),
                         settings[4].cast<std::int64_t>(), settings[5].cast<std::int64_t>()};
        made.action = static_cast<Action>(action);
        made.reader = static_cast<Reader>(reader);
        for (const auto factor : factors) {
            made.factors.push_back(factor.cast<std::int64_t>());
        }
        made.callable = std::move(callable);
        made.check = static_cast<Check>(check);
        made.accept = std::move(accept);
        if (!numbers.is_none()) {
            Numbers known;
            for (const auto number : numbers.cast<py::tuple>()) {
                known.push_back(number.cast<std::int64_t>());
            }
            made.accepted.push_back(std::move(known));
        }
        for (const auto number : results) {
            made.results.push_back(number.cast<std::int64_t>());
        }
        for (const auto item : writes) {
            made.writes.push_back(item.cast<std::pair<std::int64_t, std::int64_t>>());
        }
        entries.push_back(std::move(made));
    }

    void let_be_missing(std::size_t position) {
        entries.at(position).may_be_missing = true;
    }

    std::size_t num_values() const { return num_values_; }
    void set_num_values(std::int64_t number) {
        TORCH_CHECK_VALUE(number >= 0 && number <= kMaxValues, "no number of values: ", number);
        num_values_ = static_cast<std::size_t>(number);
    }

    std::deque<Entry> entries;  // which stay where they are while one of them runs

  private:
    std::size_t num_values_ = 0;
};

constexpr std::size_t kMaxAccepted = 64;

// One forward.
class Run {
  public:
    // `left(position, reason, function, args, kwargs, may_observe)`: what happens where a call is not the recorded one; its
    // result is the call's, and the next call may be the recorded one, with `may_observe`.
    Run(std::shared_ptr<Tape> tape, py::object left) : tape_(std::move(tape)), left_(std::move(left)) {}

    // `plain`: what the model holds that no call makes.
    void begin(const py::list& plain) {
        position_ = 0;
        num_inside_ = 0;
        has_left_ = false;
        if (slots_.use_count() > 1) {  // parts of the last forward may run again
            slots_ = std::make_shared<Slots>();
        }
        slots_->values.assign(tape_->num_values(), nothing());
        slots_->counts.assign(tape_->num_values(), 1);
        slots_->counted.clear();
        slots_->views.clear();
        slots_->plain.clear();
        for (const auto tensor : plain) {
            slots_->plain.push_back(WeakTensor(tensor_of(tensor).getIntrusivePtr()));
        }
    }

    // The forward again, from a position on: a part that is computed again in backward. It has the values of the forward.
    std::shared_ptr<Run> again(std::size_t position) const {
        TORCH_CHECK_VALUE(position <= tape_->entries.size(), "no position on the tape: ", position);
        auto made = std::make_shared<Run>(tape_, left_);
        made->slots_ = std::make_shared<Slots>(*slots_);
        made->position_ = position;
        return made;
    }

    // The values of this forward, which stay known when the next one begins.
    std::shared_ptr<Run> kept() const {
        auto made = std::make_shared<Run>(tape_, left_);
        made->slots_ = slots_;
        return made;
    }

    std::size_t position() const { return position_; }
    bool has_left() const { return has_left_; }

    void bind(std::int64_t number, PyObject* tensor) {
        const auto& held = tensor_of(tensor);
        TORCH_CHECK_VALUE(number >= 0 && number < kMaxValues, "no number of a value: ", number);
        if (static_cast<std::size_t>(number) >= slots_->values.size()) {
            slots_->values.resize(static_cast<std::size_t>(number) + 1, nothing());
            slots_->counts.resize(static_cast<std::size_t>(number) + 1, 1);
        }
        auto& slot = slots_->values[static_cast<std::size_t>(number)];
        if (slot._unsafe_get_target() != held.unsafeGetTensorImpl()) {
            slot = WeakTensor(held.getIntrusivePtr());
        }
    }

    void bind_all(const py::list& numbers, const py::list& tensors) {
        TORCH_CHECK_VALUE(numbers.size() == tensors.size(), "lists of different lengths");
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers.ptr()); ++i) {
            bind(py::handle(PyList_GET_ITEM(numbers.ptr(), i)).cast<std::int64_t>(), PyList_GET_ITEM(tensors.ptr(), i));
        }
    }

    // Whether the value with a number is this tensor.
    bool is_value(std::int64_t number, PyObject* tensor) const {
        const auto* slot = slot_of(number);
        return slot != nullptr && slot->_unsafe_get_target() == tensor_of(tensor).unsafeGetTensorImpl();
    }

    // A unit of the plan has made tensors around a module.
    void note_views(const py::list& tensors) {
        for (const auto tensor : tensors) {
            slots_->views.push_back(WeakTensor(tensor_of(tensor).getIntrusivePtr()));
        }
    }

    // Whether it is a view that a unit has made, with the memory and the form of a value.
    bool is_whole_of(std::int64_t number, PyObject* tensor) const {
        const auto* slot = slot_of(number);
        const auto known = slot == nullptr ? nothing().lock() : slot->lock();
        if (!known) {
            return false;
        }
        const auto& held = tensor_of(tensor);
        const at::Tensor base(known);
        return is_among(slots_->views, held) && !held.key_set().has(c10::DispatchKey::Python) && held.has_storage() && base.has_storage() &&
            held.data_ptr() == base.data_ptr() && held.sizes() == base.sizes() && held.strides() == base.strides() &&
            held.scalar_type() == base.scalar_type() && held.requires_grad() == base.requires_grad();
    }

    // The number that a tensor has got last; -1: it is none of the values.
    std::int64_t number_of(PyObject* tensor) const {
        const auto* found = tensor_of(tensor).unsafeGetTensorImpl();
        for (auto i = static_cast<std::int64_t>(slots_->values.size()) - 1; i >= 0; --i) {
            if (slots_->values[static_cast<std::size_t>(i)]._unsafe_get_target() == found) {
                return i;
            }
        }
        return -1;
    }

    // All numbers of a tensor: a conversion that moves nothing returns what it got.
    py::list numbers_of(PyObject* tensor) const {
        py::list found;
        const auto* wanted = tensor_of(tensor).unsafeGetTensorImpl();
        for (std::size_t i = 0; i < slots_->values.size(); ++i) {
            if (slots_->values[i]._unsafe_get_target() == wanted) {
                found.append(i);
            }
        }
        return found;
    }

    // A call of the forward. `kwargs` may be null.
    PyObject* call(PyObject* function, PyObject* args, PyObject* kwargs) {
        if (num_inside_ > 0) {  // of what an entry runs on DTensors
            return owned(PyObject_Call(function, args, kwargs)).release().ptr();
        }
        if (has_left_) {
            return leave("", function, args, kwargs, false);
        }
        if (const char* reason = find(function, args, kwargs)) {
            return leave(reason, function, args, kwargs, true);
        }
        const auto& entry = tape_->entries[position_];
        if (entry.check != Check::kNothing && !is_accepted(entry)) {
            const Numbers found = numbers_;  // the check may come by here
            const NoTorchFunction off;
            const auto named = kwargs == nullptr ? py::object(py::dict()) : py::reinterpret_borrow<py::object>(kwargs);
            has_left_ = true;  // if it raises
            owned(PyObject_CallFunctionObjArgs(entry.accept.ptr(), function, args, named.ptr(), nullptr));
            has_left_ = false;
            if (entry.accepted.size() >= kMaxAccepted) {
                entry.accepted.pop_back();
            }
            entry.accepted.insert(entry.accepted.begin(), found);
        }
        ++position_;
        ++num_inside_;
        py::object result;
        try {
            result = run(entry, function, args, kwargs);
        } catch (...) {
            --num_inside_;
            has_left_ = true;  // the recorded call has raised nothing
            throw;
        }
        --num_inside_;
        if (!has_left_) {
            note(entry, args, kwargs, result.ptr());
        }
        return result.release().ptr();
    }

    // Whether the forward has made all recorded calls, and returned the values with these numbers: "", or what differs.
    std::string end(const py::list& tensors, const py::list& numbers) const {
        if (std::any_of(tape_->entries.begin() + static_cast<std::ptrdiff_t>(position_), tape_->entries.end(),
                        [](const Entry& entry) { return !entry.may_be_missing; })) {
            return "fewer torch functions were called than in the recorded step";
        }
        if (PyList_GET_SIZE(tensors.ptr()) != PyList_GET_SIZE(numbers.ptr())) {
            return "the output has another number of tensors than in the recorded step";
        }
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers.ptr()); ++i) {
            const auto number = py::handle(PyList_GET_ITEM(numbers.ptr(), i)).cast<std::int64_t>();
            PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), i);
            if (number < 0 ? number_of(tensor) >= 0 : !is_value(number, tensor) && !is_whole_of(number, tensor)) {
                return "the output has other tensors than in the recorded step";
            }
        }
        return "";
    }

    // The forward begins: so many Python objects hold these values besides modules, which show them in as many places.
    void note_counts(const py::list& numbers, const py::list& places) {
        TORCH_CHECK_VALUE(numbers.size() == places.size(), "lists of different lengths");
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            const auto number = numbers[i].cast<std::int64_t>();
            const auto* slot = slot_of(number);
            const auto tensor = slot == nullptr ? nothing().lock() : slot->lock();
            if (tensor) {
                slots_->counts[static_cast<std::size_t>(number)] = count_of(tensor).second - places[i].cast<std::int64_t>();
                slots_->counted.push_back(static_cast<std::size_t>(number));
            }
        }
    }

    // Values that more Python objects hold than when the forward began, which autograd's graph is not.
    py::list held() const {
        py::list found;
        for (std::size_t i = 0; i < slots_->values.size(); ++i) {
            const auto tensor = slots_->values[i].lock();
            const auto [object, count] = count_of(tensor);
            if (count > slots_->counts[i] && count > expected_count(tensor.get())) {
                found.append(py::make_tuple(i, py::reinterpret_borrow<py::object>(object)));
            }
        }
        return found;
    }

  private:
    // Go to the entry of a call: the next one, or one behind entries that may be missing. What differs from the next one, if
    // there is none.
    const char* find(PyObject* function, PyObject* args, PyObject* kwargs) {
        const char* first = position_ < tape_->entries.size() ? nullptr : "the recorded step had ended";
        for (auto at = position_; at < tape_->entries.size(); ++at) {
            numbers_.clear();
            const auto& entry = tape_->entries[at];
            const char* reason = difference(entry, function, args, kwargs);
            if (reason == nullptr) {
                position_ = at;
                return nullptr;
            }
            first = first == nullptr ? reason : first;
            if (!entry.may_be_missing) {
                break;
            }
        }
        return first;
    }

    PyObject* leave(const char* reason, PyObject* function, PyObject* args, PyObject* kwargs, bool may_observe) {
        has_left_ = true;
        const auto named = kwargs == nullptr ? py::object(py::dict()) : py::reinterpret_borrow<py::object>(kwargs);
        const auto place = owned(PyLong_FromSize_t(position_));
        const auto text = owned(PyUnicode_FromString(reason));
        auto result = owned(PyObject_CallFunctionObjArgs(
            left_.ptr(), place.ptr(), text.ptr(), function, args, named.ptr(), may_observe ? Py_True : Py_False, nullptr));
        has_left_ = false;
        return result.release().ptr();
    }

    // Of slots that are bound, as `x.__repr__`; headers of Python 3.13 do not declare it.
    static PyTypeObject* method_wrapper_type() {
        static PyTypeObject* const found = Py_TYPE(owned(PyObject_GetAttrString(Py_None, "__repr__")).ptr());
        return found;
    }

    static bool is_same_function(PyObject* recorded, PyObject* called) {
        if (recorded == called) {
            return true;
        }
        if (Py_TYPE(recorded) != Py_TYPE(called) || (Py_TYPE(called) != method_wrapper_type() && !PyCFunction_Check(called))) {
            return false;
        }
        const int found = PyObject_RichCompareBool(recorded, called, Py_EQ);
        if (found < 0) {
            throw python_error();
        }
        return found == 1;
    }

    // Whether `value` is what a weak reference refers to.
    static bool is_referent(PyObject* reference, PyObject* value) {
        if (!PyWeakref_CheckRef(reference) || value == Py_None) {
            return false;
        }
#if PY_VERSION_HEX >= 0x030D0000
        PyObject* found = nullptr;
        const bool is_alive = PyWeakref_GetRef(reference, &found) == 1;
        return is_alive && owned(found).ptr() == value;
#else
        return PyWeakref_GET_OBJECT(reference) == value;
#endif
    }

    // What differs from the recorded call; null: nothing that matters without looking at `numbers_`.
    const char* difference(const Entry& entry, PyObject* function, PyObject* args, PyObject* kwargs) {
        if (!is_same_function(entry.function.ptr(), function)) {
            return "another function is called";
        }
        if (!(Settings::now() == entry.settings)) {
            return "gradients or autocast are switched on or off";
        }
        const auto num_named = kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs);
        if (PyTuple_GET_SIZE(args) != static_cast<Py_ssize_t>(entry.args.size()) ||
            num_named != static_cast<Py_ssize_t>(entry.kwargs.size())) {
            return "it gets another number of arguments";
        }
        for (std::size_t i = 0; i < entry.args.size(); ++i) {
            if (const char* reason = differs(entry.args[i], PyTuple_GET_ITEM(args, i), entry.check)) {
                return reason;
            }
        }
        Py_ssize_t at = 0;
        PyObject *name = nullptr, *value = nullptr;
        for (const auto& [known, expected] : entry.kwargs) {  // in order, by which tensors are counted
            if (!PyDict_Next(kwargs, &at, &name, &value) || !PyUnicode_Check(name) ||
                (name != known.ptr() && PyUnicode_Compare(name, known.ptr()) != 0)) {
                return "it gets arguments with other names";
            }
            if (const char* reason = differs(expected, value, entry.check)) {
                return reason;
            }
        }
        return nullptr;
    }

    const char* differs(const Expected& expected, PyObject* value, Check check) {
        switch (expected.kind) {
            case Kind::kValue:
            case Kind::kView:
                if (!THPVariable_Check(value)) {
                    return "it gets something else than a tensor";
                }
                if (!is_value(expected.number, value)) {
                    if (expected.kind == Kind::kValue || !is_whole_of(expected.base, value)) {
                        return "it gets another tensor";
                    }
                    bind(expected.number, value);
                }
                note_sizes(THPVariable_Unpack(value), check);
                return nullptr;
            case Kind::kPlain: {
                if (!THPVariable_Check(value)) {
                    return "it gets something else than a tensor";
                }
                const auto& tensor = THPVariable_Unpack(value);
                // No call has made it: other threads may have, of local tensors. Memory of others, as numpy's, is filled before.
                const bool is_known = is_referent(expected.object.ptr(), value) || is_among(slots_->plain, tensor) ||
                    (tensor.has_storage() && !tensor.storage().resizable());
                if (!is_known || tensor.key_set().has(c10::DispatchKey::Python) || tensor.dim() != expected.number ||
                    tensor.requires_grad() != expected.requires_grad || number_of(value) >= 0) {
                    return "it gets another tensor";
                }
                note_sizes(tensor, check);
                return nullptr;
            }
            case Kind::kInt: {
                if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != expected.object.ptr()) {
                    return "it gets something else than a whole number";
                }
                const auto number = PyLong_CheckExact(value) ? py::reinterpret_borrow<py::object>(value)
                                                             : owned(PyNumber_Index(value));
                int overflow = 0;
                numbers_.push_back(PyLong_AsLongLongAndOverflow(number.ptr(), &overflow));
                return overflow == 0 ? nullptr : "it gets a number that is too large";
            }
            case Kind::kFloat: {
                if (!PyFloat_Check(value)) {  // also a scalar of numpy
                    return "it gets something else than a fraction";
                }
                const double number = PyFloat_AS_DOUBLE(value);
                numbers_.push_back(number == 0.0 ? 0 : number == 1.0 ? 1 : 2);
                return nullptr;
            }
            case Kind::kSame:
                return expected.object.ptr() == value || is_referent(expected.object.ptr(), value) ? nullptr
                                                                                                   : "it gets another object";
            case Kind::kEqual: {
                if (expected.object.ptr() == value) {
                    return nullptr;
                }
                if (Py_TYPE(expected.object.ptr()) != Py_TYPE(value)) {
                    return "it gets an object of another type";
                }
                const int found = PyObject_RichCompareBool(expected.object.ptr(), value, Py_EQ);
                if (found < 0) {
                    throw python_error();
                }
                return found == 1 ? nullptr : "it gets another value";
            }
            case Kind::kSequence: {
                if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != expected.object.ptr()) {
                    return "it gets an object of another type";
                }
                if (PySequence_Fast_GET_SIZE(value) != static_cast<Py_ssize_t>(expected.items.size())) {
                    return "it gets a sequence of another length";
                }
                for (std::size_t i = 0; i < expected.items.size(); ++i) {
                    if (const char* reason = differs(expected.items[i], PySequence_Fast_GET_ITEM(value, i), check)) {
                        return reason;
                    }
                }
                return nullptr;
            }
            case Kind::kDict: {
                if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != static_cast<Py_ssize_t>(expected.items.size())) {
                    return "it gets another dictionary";
                }
                for (std::size_t i = 0; i < expected.items.size(); ++i) {
                    PyObject* item = PyDict_GetItemWithError(value, PyTuple_GET_ITEM(expected.object.ptr(), i));
                    if (item == nullptr) {
                        return "it gets another dictionary";
                    }
                    if (const char* reason = differs(expected.items[i], item, check)) {
                        return reason;
                    }
                }
                return nullptr;
            }
            case Kind::kSlice: {
                if (!PySlice_Check(value)) {
                    return "it gets something else than a slice";
                }
                const auto* slice = reinterpret_cast<PySliceObject*>(value);
                PyObject* parts[] = {slice->start, slice->stop, slice->step};
                for (std::size_t i = 0; i < 3; ++i) {
                    if (const char* reason = differs(expected.items[i], parts[i], check)) {
                        return reason;
                    }
                }
                return nullptr;
            }
        }
        return "it gets something unknown";
    }

    void note_sizes(const at::Tensor& tensor, Check check) {
        if (check == Check::kSizes) {
            for (const auto size : tensor.sizes()) {
                numbers_.push_back(size);
            }
        } else if (check == Check::kNumbers) {
            numbers_.push_back(ones_of(tensor));
        }
    }

    bool is_accepted(const Entry& entry) const {
        for (std::size_t i = 0; i < entry.accepted.size(); ++i) {
            if (entry.accepted[i] == numbers_) {
                if (i > 0) {
                    std::swap(entry.accepted[i], entry.accepted[0]);
                }
                return true;
            }
        }
        return false;
    }

    py::object run(const Entry& entry, PyObject* function, PyObject* args, PyObject* kwargs) {
        const NoTorchFunction off;
        switch (entry.action) {
            case Action::kLocal:
                return owned(PyObject_Call(function, args, kwargs));
            case Action::kReadSizes:
                return read_sizes(entry, args, kwargs);
            case Action::kTakeSizes: {
                const auto local = local_sizes(entry, args);
                return local ? owned(PyObject_Call(function, local.ptr(), kwargs))
                             : owned(leave("a size does not divide evenly", function, args, kwargs, false));
            }
            case Action::kPython: {
                const auto named = kwargs == nullptr ? py::object(py::dict()) : py::reinterpret_borrow<py::object>(kwargs);
                return owned(PyObject_CallFunctionObjArgs(entry.callable.ptr(), function, args, named.ptr(), nullptr));
            }
        }
        return py::none();
    }

    static py::object read_sizes(const Entry& entry, PyObject* args, PyObject* kwargs) {
        const auto& tensor = tensor_of(first_of(args));
        TORCH_CHECK_VALUE(tensor.dim() == static_cast<std::int64_t>(entry.factors.size()), "a tensor of other dims than the entry's");
        Numbers sizes;
        std::int64_t count = 1;
        for (const auto i : c10::irange(tensor.dim())) {
            sizes.push_back(tensor.size(i) * entry.factors[static_cast<std::size_t>(i)]);
            count *= sizes.back();
        }
        PyObject* dim = PyTuple_GET_SIZE(args) > 1 ? PyTuple_GET_ITEM(args, 1)
            : kwargs == nullptr                    ? nullptr
                                                   : PyDict_GetItemString(kwargs, "dim");
        if (entry.reader == Reader::kCount) {
            return py::int_(count);
        }
        if (entry.reader == Reader::kLength && !sizes.empty()) {
            return py::int_(sizes[0]);
        }
        auto& [known, whole] = entry.known_size;
        if (!whole || known != sizes) {
            auto items = owned(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
            for (std::size_t i = 0; i < sizes.size(); ++i) {
                PyTuple_SET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(sizes[i]));
            }
            whole = owned(PyObject_CallOneArg(size_type().ptr(), items.ptr()));
            known = sizes;
        }
        if (entry.reader == Reader::kSize && dim != nullptr && dim != Py_None) {
            return owned(PyObject_GetItem(whole.ptr(), dim));
        }
        return whole;
    }

    // The arguments with local sizes; null: they have none.
    static py::object local_sizes(const Entry& entry, PyObject* args) {
        PyObject* tensor = first_of(args);
        PyObject* given = args;
        Py_ssize_t first = 1;
        if (PyTuple_GET_SIZE(args) == 2 && !PyIndex_Check(PyTuple_GET_ITEM(args, 1))) {
            given = PyTuple_GET_ITEM(args, 1);
            first = 0;
        }
        if (!PyTuple_Check(given) && !PyList_Check(given)) {
            return {};
        }
        const auto count = PySequence_Fast_GET_SIZE(given) - first;
        if (count != static_cast<Py_ssize_t>(entry.factors.size())) {
            return {};
        }
        auto sizes = owned(PyTuple_New(count));
        for (Py_ssize_t i = 0; i < count; ++i) {
            const auto size = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(given, first + i));
            if (size == -1 && PyErr_Occurred()) {
                throw python_error();
            }
            const auto factor = entry.factors[static_cast<std::size_t>(i)];
            const bool is_cut = factor > 1 && size > 0;
            if (is_cut && size % factor != 0) {
                return {};
            }
            PyTuple_SET_ITEM(sizes.ptr(), i, PyLong_FromLongLong(is_cut ? size / factor : size));
        }
        return owned(PyTuple_Pack(2, tensor, sizes.ptr()));
    }

    static PyObject* first_of(PyObject* args) {
        TORCH_CHECK_VALUE(PyTuple_GET_SIZE(args) > 0, "a call without a tensor");
        return PyTuple_GET_ITEM(args, 0);
    }

    void note(const Entry& entry, PyObject* args, PyObject* kwargs, PyObject* result) {
        std::size_t count = 0;
        const NoTorchFunction off;
        see_tensors(result, [&](PyObject* tensor) {
            if (count < entry.results.size() && entry.results[count] >= 0) {
                bind(entry.results[count], tensor);
            }
            ++count;
        });
        if (count != entry.results.size()) {
            has_left_ = true;
            owned(PyObject_CallFunctionObjArgs(
                left_.ptr(), owned(PyLong_FromSize_t(position_ - 1)).ptr(),
                owned(PyUnicode_FromString("it returns another number of tensors")).ptr(), Py_None, Py_None, Py_None, Py_False,
                nullptr));
        }
        if (!entry.writes.empty()) {
            std::int64_t place = 0;
            const auto rebind = [&](PyObject* tensor) {
                for (const auto& [written, number] : entry.writes) {
                    if (written == place) {
                        bind(number, tensor);
                    }
                }
                ++place;
            };
            see_tensors(args, rebind);
            if (kwargs != nullptr) {
                see_tensors(kwargs, rebind);
            }
        }
    }

    // Null: there is no value with this number.
    const WeakTensor* slot_of(std::int64_t number) const {
        const bool is_known = number >= 0 && static_cast<std::size_t>(number) < slots_->values.size();
        return is_known ? &slots_->values[static_cast<std::size_t>(number)] : nullptr;
    }

    // Of a value that is another one as well, which was counted.
    std::int64_t expected_count(const c10::TensorImpl* tensor) const {
        std::int64_t found = 1;
        for (const auto i : slots_->counted) {
            found = slots_->values[i]._unsafe_get_target() == tensor ? std::max(found, slots_->counts[i]) : found;
        }
        return found;
    }

    // The Python object of a tensor, and its references. The tensor is held here as well, so that one of them is from C++.
    static std::pair<PyObject*, std::int64_t> count_of(const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& tensor) {
        PyObject* object = tensor ? tensor->pyobj_slot()->load_pyobj() : nullptr;
        return {object, object == nullptr ? 1 : static_cast<std::int64_t>(Py_REFCNT(object))};
    }

    std::shared_ptr<Tape> tape_;
    py::object left_;
    struct Slots {
        std::vector<WeakTensor> values;
        std::vector<std::int64_t> counts;  // of Python objects that may hold each
        std::vector<std::size_t> counted;  // those of which that is known
        std::vector<WeakTensor> views;  // that units have made
        std::vector<WeakTensor> plain;  // that were there when the forward began
    };
    static bool is_among(const std::vector<WeakTensor>& known, const at::Tensor& tensor) {
        const auto* own = tensor.unsafeGetTensorImpl();
        return std::any_of(known.begin(), known.end(), [own](const WeakTensor& one) { return one._unsafe_get_target() == own; });
    }

    static WeakTensor nothing() {
        return WeakTensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
    }

    std::shared_ptr<Slots> slots_ = std::make_shared<Slots>();
    std::size_t position_ = 0;
    bool has_left_ = false;
    int num_inside_ = 0;  // entries that run
    Numbers numbers_;  // among the arguments of the current call
};

// ``__torch_function__`` of a mode, as PyTorch calls it: ``(function, kinds, args, kwargs)``.
struct Cursor {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* mode;  // a weak reference: the mode holds this object
    std::shared_ptr<Run> run;
};

PyObject* call_cursor(PyObject* object, PyObject* const* given, std::size_t num_given, PyObject*) {
    HANDLE_TH_ERRORS
    const auto num_arguments = PyVectorcall_NARGS(num_given);
    TORCH_CHECK_TYPE(num_arguments >= 2 && num_arguments <= 4, "expected (function, kinds, args, kwargs)");
    static PyObject* nothing = PyTuple_New(0);
    PyObject* args = num_arguments > 2 ? given[2] : nothing;
    PyObject* kwargs = num_arguments > 3 && given[3] != Py_None ? given[3] : nullptr;
    TORCH_CHECK_TYPE(PyTuple_Check(args) && (kwargs == nullptr || PyDict_Check(kwargs)), "expected a tuple and a dictionary");
    const auto run = reinterpret_cast<Cursor*>(object)->run;
    return run->call(given[0], args, kwargs);
    END_HANDLE_TH_ERRORS
}

PyObject* self_of_cursor(PyObject* object, void*) {
    return PyObject_CallNoArgs(reinterpret_cast<Cursor*>(object)->mode);
}

void free_cursor(PyObject* object) {
    auto* cursor = reinterpret_cast<Cursor*>(object);
    auto* type = Py_TYPE(object);
    Py_CLEAR(cursor->mode);
    std::destroy_at(&cursor->run);
    type->tp_free(object);
    Py_DECREF(type);
}

PyTypeObject* cursor_type() {
    static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Cursor, call), READONLY, nullptr}, {}};
    static PyGetSetDef properties[] = {{"__self__", self_of_cursor, nullptr, nullptr, nullptr}, {}};
    static PyType_Slot slots[] = {
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_dealloc, reinterpret_cast<void*>(free_cursor)},
        {Py_tp_members, members},
        {Py_tp_getset, properties},
        {0, nullptr}};
    static PyType_Spec spec = {
        "vescale.csrc._tape.Cursor", sizeof(Cursor), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static auto* made = reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
    return made;
}

// `mode`: a weak reference.
py::object make_cursor(const py::object& mode, std::shared_ptr<Run> run) {
    auto* type = cursor_type();
    auto made = owned(type->tp_alloc(type, 0));
    auto& cursor = *reinterpret_cast<Cursor*>(made.ptr());
    cursor.call = call_cursor;
    cursor.mode = mode.inc_ref().ptr();
    new (&cursor.run) std::shared_ptr<Run>(std::move(run));
    return made;
}

py::object step(Run& run, const py::object& function, const py::tuple& args) {
    return owned(run.call(function.ptr(), args.ptr(), nullptr));
}

void bind(Run& run, std::int64_t number, const py::object& tensor) {
    run.bind(number, tensor.ptr());
}

py::list numbers_of(const Run& run, const py::object& tensor) {
    return run.numbers_of(tensor.ptr());
}

// What entries compare beside functions and arguments.
py::tuple settings() {
    const auto now = Settings::now();
    return py::make_tuple(
        now.gradients, now.inference, now.autocast_cpu, now.autocast_gpu, now.dispatch_modes, now.saved_tensors_hooks);
}

}  // namespace
}  // namespace vescale

PYBIND11_MODULE(_tape, module) {
    using vescale::Run;
    using vescale::Tape;
    using vescale::made_by_calls;
    made_by_calls(py::class_<Tape, std::shared_ptr<Tape>>(module, "Tape"))
        .def(py::init<>())
        .def("add", vescale::method(&Tape::add))
        .def("let_be_missing", vescale::method(&Tape::let_be_missing))
        .def_property("num_values", vescale::method(&Tape::num_values), vescale::method(&Tape::set_num_values))
        .def("__len__", [](const Tape& tape) { return tape.entries.size(); });
    made_by_calls(py::class_<Run, std::shared_ptr<Run>>(module, "Run"))
        .def(py::init<std::shared_ptr<Tape>, py::object>(), py::arg("tape").none(false), py::arg("left"))
        .def("begin", vescale::method(&Run::begin))
        .def("again", vescale::method(&Run::again))
        .def("kept", vescale::method(&Run::kept))
        .def("bind", torch::wrap_pybind_function(&vescale::bind))
        .def("bind_all", vescale::method(&Run::bind_all))
        .def("numbers_of", torch::wrap_pybind_function(&vescale::numbers_of))
        .def("step", torch::wrap_pybind_function(&vescale::step))
        .def("end", vescale::method(&Run::end))
        .def("note_counts", vescale::method(&Run::note_counts))
        .def("note_views", vescale::method(&Run::note_views))
        .def("held", vescale::method(&Run::held))
        .def_property_readonly("position", vescale::method(&Run::position))
        .def_property_readonly("has_left", vescale::method(&Run::has_left));
    module.def("make_cursor", &vescale::make_cursor, py::arg("mode"), py::arg("run").none(false));
    module.def("settings", &vescale::settings);
    module.def("set_tensors_in", &vescale::set_tensors_in);
}
