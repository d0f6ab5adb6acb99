// The forward hooks of a parallelized model's modules: what `Enter` and `Leave` of vescale/runtime/_module_calls.py do.
//
// Every module of a model has the two, and most have nothing else to do than to tell that they run: for autograd's nodes, for
// functions that ask which module calls them, and for reports. Here that is done without Python, in the same Python objects.
// The conversions that a plan asks for, and the entry into the outermost module, are Python functions.
//
// The interpreter's lock is held throughout. The library is for one version of torch, which its file name contains.

#include "boundaries.h"
#include "dtensor.h"
#include "frame.h"
#include "module_call.h"
#include "no_torch_function.h"
#include "timeline.h"

namespace vescale {
namespace {

// What is asked of Python.
struct Callbacks {
    py::object thread;  // a threading.local, whose `stack` lists the activations
    py::object set_compiler;  // what torch.compile does with this thread's frames -> what it did before
    py::object begin;  // (runtime, module, path) -> the activation of a forward that begins with this module
    py::object end;  // (activation) -> None, after its outermost module
    py::object warn;  // (runtime, path) -> None: the module was about to be compiled
    py::object results;  // (path, output) -> [(path, address)] of the DTensors in it
    py::object settle;  // (what was placed) -> None, after the forward: brings writes to it to the caller's tensors
};

Callbacks& callbacks() {
    static auto* made = new Callbacks;
    return *made;
}

// Names of attributes.
struct Names {
    py::object stack = owned(PyUnicode_InternFromString("stack"));
    py::object runtime = owned(PyUnicode_InternFromString("runtime"));
    py::object frames = owned(PyUnicode_InternFromString("frames"));
    py::object module = owned(PyUnicode_InternFromString("module"));
    py::object path = owned(PyUnicode_InternFromString("path"));
    py::object compiler = owned(PyUnicode_InternFromString("compiler"));
    py::object where = owned(PyUnicode_InternFromString("where"));
    py::object placed = owned(PyUnicode_InternFromString("placed"));
    py::object results = owned(PyUnicode_InternFromString("results"));
    py::object converted = owned(PyUnicode_InternFromString("converted"));
    py::object recorder = owned(PyUnicode_InternFromString("recorder"));
};

const Names& names() {
    static const auto* made = new Names;
    return *made;
}

py::object attribute(py::handle object, const py::object& name) {
    return owned(PyObject_GetAttr(object.ptr(), name.ptr()));
}

// A list among the attributes.
py::list list_of(py::handle object, const py::object& name) {
    auto found = attribute(object, name);
    TORCH_CHECK_TYPE(PyList_Check(found.ptr()), "expected a list");
    return py::reinterpret_steal<py::list>(found.release());
}

// What has the number of items, or more.
const py::object& checked_tuple(const py::object& given, Py_ssize_t num_items) {
    TORCH_CHECK_TYPE(PyTuple_Check(given.ptr()) && PyTuple_GET_SIZE(given.ptr()) >= num_items, "expected a tuple of ", num_items);
    return given;
}

// The module of a frame, which Python may have made.
py::object part(py::handle frame, PyObject* Frame::*member, const py::object& name) {
    if (Py_TYPE(frame.ptr()) != Frame::type) {
        return attribute(frame, name);
    }
    PyObject* held = reinterpret_cast<Frame*>(frame.ptr())->*member;
    return py::reinterpret_borrow<py::object>(held == nullptr ? Py_None : held);
}

// A hook of one module: a callable that is copied with its model.
struct Hook {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* runtime;
    PyObject* path;
    PyObject* place;  // None: nothing to place
    PyObject* entries;  // what `place` carries out, for BoundaryEntries; None: it does more
    BoundaryEntries* known;  // of these; null: none
    PyObject* around;  // None: no parameter to show, or to hide
    PyObject* timeline;
    PyObject* where;  // what the timeline marks

    void mark(PyObject* at) const { py::cast<Timeline&>(py::handle(timeline)).mark(at); }

    // The innermost activation if it is of this model, else null.
    py::object activation() const {
        const auto stack = list_of(callbacks().thread, names().stack);
        const auto length = PyList_GET_SIZE(stack.ptr());
        if (length == 0) {
            return {};
        }
        auto last = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(stack.ptr(), length - 1));
        return attribute(last, names().runtime).ptr() == runtime ? last : py::object();
    }

    // The innermost frame of the thread, of whatever model; null where there is none, or somebody records what is placed.
    static py::object calling_frame() {
        const auto stack = list_of(callbacks().thread, names().stack);
        const auto length = PyList_GET_SIZE(stack.ptr());
        if (length == 0) {
            return {};
        }
        const auto last = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(stack.ptr(), length - 1));
        if (!attribute(last, names().recorder).is_none()) {
            return {};
        }
        const auto frames = list_of(last, names().frames);
        const auto depth = PyList_GET_SIZE(frames.ptr());
        return depth == 0 ? py::object() : py::reinterpret_borrow<py::object>(PyList_GET_ITEM(frames.ptr(), depth - 1));
    }

    // Before the forward: the arguments in a tuple, or None if they stay.
    py::object enter(PyObject* module, PyObject* args, PyObject* kwargs) const {
        TORCH_CHECK_TYPE(PyTuple_Check(args) && PyDict_Check(kwargs), "expected a tuple and a dictionary");
        auto& python = callbacks();
        const auto compiler = owned(PyObject_CallOneArg(python.set_compiler.ptr(), Py_None));
        py::object placed = py::none(), held = py::none();
        if (place != Py_None) {
            const NoTorchFunction guard;
            if (const auto caller = known == nullptr ? py::object() : calling_frame()) {
                placed = known->place_inputs(args, kwargs, attribute(caller, names().converted));
            }
            if (placed.is_none()) {
                const auto answer = checked_tuple(owned(PyObject_CallFunctionObjArgs(place, args, kwargs, nullptr)), 3);
                held = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(answer.ptr(), 2));
                placed = owned(PyTuple_GetSlice(answer.ptr(), 0, 2));
            }
            args = PyTuple_GET_ITEM(placed.ptr(), 0);
            kwargs = PyTuple_GET_ITEM(placed.ptr(), 1);
        }
        auto active = activation();
        if (!active) {
            active = owned(PyObject_CallFunctionObjArgs(python.begin.ptr(), runtime, module, path, nullptr));
        }
        const auto frame = owned(Frame::make(module, path, args, kwargs, where));
        if (!held.is_none()) {
            reinterpret_cast<Frame*>(frame.ptr())->placed = held.inc_ref().ptr();
        }
        if (PyList_Append(list_of(active, names().frames).ptr(), frame.ptr()) != 0) {
            throw python_error();
        }
        mark(where);
        if (!compiler.is_none()) {
            reinterpret_cast<Frame*>(frame.ptr())->compiler = compiler.inc_ref().ptr();
            owned(PyObject_CallFunctionObjArgs(python.warn.ptr(), runtime, path, nullptr));
        }
        if (around != Py_None) {
            owned(PyObject_CallOneArg(around, module));
        }
        return placed;
    }

    // After the forward, also one that has failed (the output is None then): the new output, or None if it stays.
    py::object leave(PyObject* module, PyObject* output) const {
        auto placed = py::reinterpret_borrow<py::object>(output);
        try {
            settle(module);
            if (place != Py_None && output != Py_None) {
                const NoTorchFunction guard;
                placed = known != nullptr && calling_frame() ? known->place_output(output) : py::object();
                if (!placed) {
                    placed = owned(PyObject_CallOneArg(place, output));
                }
            }
        } catch (python_error& error) {
            error.persist();
            finish(module, output);
            throw;
        }
        finish(module, placed.ptr());
        return placed.ptr() == output ? py::object(py::none()) : placed;
    }

  private:
    // The innermost frame is the module's, unless it has failed.
    void settle(PyObject* module) const {
        const auto active = activation();
        if (!active) {
            return;
        }
        const auto frames = list_of(active, names().frames);
        const auto last = PyList_GET_SIZE(frames.ptr()) - 1;
        if (last < 0) {
            return;
        }
        const auto frame = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(frames.ptr(), last));
        const auto held = part(frame, &Frame::placed, names().placed);
        if (!held.is_none() && part(frame, &Frame::module, names().module).ptr() == module) {
            const NoTorchFunction guard;
            owned(PyObject_CallOneArg(callbacks().settle.ptr(), held.ptr()));
        }
    }

    void finish(PyObject* module, PyObject* output) const {
        if (around != Py_None) {
            owned(PyObject_CallOneArg(around, module));
        }
        const auto active = activation();
        if (!active) {
            return;
        }
        const auto frames = list_of(active, names().frames);
        const auto frame_at = [&](Py_ssize_t i) { return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(frames.ptr(), i)); };
        auto index = PyList_GET_SIZE(frames.ptr()) - 1;
        while (index >= 0 && part(frame_at(index), &Frame::module, names().module).ptr() != module) {
            index -= 1;
        }
        if (index < 0) {  // the module failed before it had entered
            return;
        }
        for (auto last = PyList_GET_SIZE(frames.ptr()) - 1; last >= index; --last) {
            const auto frame = frame_at(last);
            if (PyList_SetSlice(frames.ptr(), last, last + 1, nullptr) != 0) {
                throw python_error();
            }
            const auto compiler = part(frame, &Frame::compiler, names().compiler);
            if (!compiler.is_none()) {
                owned(PyObject_CallOneArg(callbacks().set_compiler.ptr(), compiler.ptr()));
            }
        }
        if (index == 0) {
            owned(PyObject_CallOneArg(callbacks().end.ptr(), active.ptr()));
            return;
        }
        const auto parent = frame_at(index - 1);
        remember(parent, output);
        mark(part(parent, &Frame::where, names().where).ptr());
    }

    // Names the DTensors in an output, for reports of what the calling module does with them.
    void remember(const py::object& parent, PyObject* output) const {
        if (output == Py_None || THPVariable_CheckExact(output)) {
            return;
        }
        if (Py_TYPE(output) == dtensor_class().type) {
            if (!has_local(output)) {
                return;
            }
            const at::Tensor& local = local_of(output);
            if (local.is_meta() || local.key_set().has(c10::DispatchKey::Python) || !local.has_storage()) {
                return;
            }
            const auto address = owned(PyLong_FromVoidPtr(const_cast<void*>(local.const_data_ptr())));
            add(parent, owned(PyTuple_Pack(2, path, address.ptr())));
        } else if (PyTuple_CheckExact(output) || PyList_CheckExact(output)) {
            const Nested nested;
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(output); ++i) {
                remember(parent, PySequence_Fast_GET_ITEM(output, i));
            }
        } else {
            for (const auto result : owned(PyObject_CallFunctionObjArgs(callbacks().results.ptr(), path, output, nullptr))) {
                add(parent, py::reinterpret_borrow<py::object>(result));
            }
        }
    }

    static void add(const py::object& parent, const py::object& result) {
        if (PyList_Append(list_of(parent, names().results).ptr(), result.ptr()) != 0) {
            throw python_error();
        }
    }
};

// The arguments of a call by position, which is how modules call their hooks.
PyObject* checked(PyObject* const* args, size_t num_args, PyObject* names_of_args, Py_ssize_t num_expected) {
    TORCH_CHECK_TYPE(
        names_of_args == nullptr && PyVectorcall_NARGS(num_args) == num_expected,
        "a hook of a parallelized model's module gets ", num_expected, " arguments by position, and got ",
        PyVectorcall_NARGS(num_args),
        ": a tool has copied it to another module without with_kwargs (quantize_dynamic does with the modules that it "
        "swaps). Convert the model on one device: before parallelize, or one that has loaded its state dict");
    return args[0];
}

PyObject* call_enter(PyObject* self, PyObject* const* args, size_t num_args, PyObject* names_of_args) {
    HANDLE_TH_ERRORS
    PyObject* module = checked(args, num_args, names_of_args, 3);
    return reinterpret_cast<Hook*>(self)->enter(module, args[1], args[2]).release().ptr();
    END_HANDLE_TH_ERRORS
}

PyObject* call_leave(PyObject* self, PyObject* const* args, size_t num_args, PyObject* names_of_args) {
    HANDLE_TH_ERRORS
    PyObject* module = checked(args, num_args, names_of_args, 4);
    return reinterpret_cast<Hook*>(self)->leave(module, args[3]).release().ptr();
    END_HANDLE_TH_ERRORS
}

template <vectorcallfunc call>
PyObject* new_hook(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    HANDLE_TH_ERRORS
    PyObject *runtime, *path, *place, *around, *entries;
    static const char* keywords[] = {"runtime", "path", "place", "around", "entries", nullptr};
    if (PyArg_ParseTupleAndKeywords(
            args, kwargs, "OUOOO", const_cast<char**>(keywords), &runtime, &path, &place, &around, &entries) == 0) {
        return nullptr;
    }
    std::unique_ptr<BoundaryEntries> known;
    if (entries != Py_None && boundary_functions() != nullptr) {
        known = std::make_unique<BoundaryEntries>(py::reinterpret_borrow<py::object>(entries).cast<py::tuple>());
    }
    for (const auto* function : {&callbacks().thread, &callbacks().set_compiler}) {
        require(*function);
    }
    auto timeline = owned(PyObject_GetAttrString(runtime, "timeline"));
    py::cast<Timeline&>(timeline);  // or an error
    auto where = owned(PyObject_CallMethod(runtime, "where", "O", path));
    const auto made = owned(type->tp_alloc(type, 0));
    auto* hook = reinterpret_cast<Hook*>(made.ptr());
    hook->call = call;
    hook->runtime = Py_NewRef(runtime);
    hook->path = Py_NewRef(path);
    hook->place = Py_NewRef(place);
    hook->around = Py_NewRef(around);
    hook->entries = Py_NewRef(entries);
    hook->known = known.release();
    hook->timeline = timeline.release().ptr();
    hook->where = where.release().ptr();
    return made.inc_ref().ptr();
    END_HANDLE_TH_ERRORS
}

int clear_hook(PyObject* object) {
    auto* hook = reinterpret_cast<Hook*>(object);
    Py_CLEAR(hook->runtime);
    Py_CLEAR(hook->path);
    Py_CLEAR(hook->place);
    Py_CLEAR(hook->around);
    Py_CLEAR(hook->entries);
    delete std::exchange(hook->known, nullptr);
    Py_CLEAR(hook->timeline);
    Py_CLEAR(hook->where);
    return 0;
}

int traverse_hook(PyObject* object, visitproc visit, void* arg) {
    auto* hook = reinterpret_cast<Hook*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(hook->runtime);
    Py_VISIT(hook->place);
    Py_VISIT(hook->around);
    Py_VISIT(hook->entries);
    return hook->known == nullptr ? 0 : hook->known->traverse(visit, arg);
}

void delete_hook(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_hook(object);
    type->tp_free(object);
    Py_DECREF(type);
}

// A copy is a hook of the copied model.
PyObject* reduce_hook(PyObject* object, PyObject*) {
    const auto* hook = reinterpret_cast<Hook*>(object);
    return Py_BuildValue(
        "O(OOOOO)", Py_TYPE(object), hook->runtime, hook->path, hook->place, hook->around, hook->entries);
}

template <vectorcallfunc call>
py::object hook_type(const char* name) {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, call), READONLY, nullptr},
        {"path", T_OBJECT_EX, offsetof(Hook, path), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyMethodDef methods[] = {{"__reduce__", reduce_hook, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(new_hook<call>)},
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_dealloc, reinterpret_cast<void*>(delete_hook)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse_hook)},
        {Py_tp_clear, reinterpret_cast<void*>(clear_hook)},
        {Py_tp_members, members},
        {Py_tp_methods, methods},
        {0, nullptr}};
    PyType_Spec spec = {
        name, sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return owned(PyType_FromSpec(&spec));
}

void install(
    const py::object& dtensor, const py::object& spec, const py::object& local, py::object set_compiler,
    const py::object& functions) {
    boundary_functions() = static_cast<const BoundaryFunctions*>(PyCapsule_GetPointer(functions.ptr(), kBoundaryFunctions));
    if (boundary_functions() == nullptr) {
        throw python_error();
    }
    set_dtensor_class(dtensor, spec, local);
    callbacks().set_compiler = std::move(set_compiler);
}

void set_callbacks(
    py::object thread, py::object begin, py::object end, py::object warn, py::object results, py::object settle) {
    auto& python = callbacks();
    python.thread = std::move(thread);
    python.begin = std::move(begin);
    python.end = std::move(end);
    python.warn = std::move(warn);
    python.results = std::move(results);
    python.settle = std::move(settle);
}

}  // namespace
}  // namespace vescale

PYBIND11_MODULE(_module_hooks, module) {
    using vescale::Timeline;
    vescale::Frame::ready();
    vescale::made_by_calls(py::class_<Timeline>(module, "Timeline"))
        .def(py::init<std::size_t>())
        .def("mark", [](Timeline& timeline, const py::object& where) { timeline.mark(where.ptr()); })
        .def("of_current_node", vescale::method(&Timeline::of_current_node))
        .def("of_node", vescale::method(&Timeline::of_node))
        .def("__len__", vescale::method(&Timeline::length));
    module.attr("Enter") = vescale::hook_type<vescale::call_enter>("vescale.csrc._module_hooks.Enter");
    module.attr("Leave") = vescale::hook_type<vescale::call_leave>("vescale.csrc._module_hooks.Leave");
    module.attr("ModuleCall") = vescale::ModuleCall::type();
    module.def("set_call_functions", &vescale::set_call_functions);
    module.def("install", &vescale::install);
    module.def("set_callbacks", &vescale::set_callbacks);
}
