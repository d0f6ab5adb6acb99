// Where the modules of a program hold given functions: what compat/patching.py looks for when it replaces them.

#include <torch/csrc/utils/pybind.h>

#include <unordered_set>
#include <utility>
#include <vector>

namespace vescale {

// The namespace and the name of each place, in the order of the modules. Nothing but what is found is counted as referred
// to: in a process that was forked, that would copy the memory of every object that any module holds.
std::vector<std::pair<py::dict, py::object>> holders(const py::dict& modules, const py::iterable& functions) {
    std::unordered_set<PyObject*> wanted;
    for (const auto& function : functions) {
        wanted.insert(function.ptr());
    }
    std::vector<std::pair<py::dict, py::object>> found;
    PyObject* module = nullptr;
    Py_ssize_t at_module = 0;
    while (PyDict_Next(modules.ptr(), &at_module, nullptr, &module)) {
        if (!PyModule_Check(module)) {
            continue;
        }
        PyObject* names = PyModule_GetDict(module);
        PyObject* name = nullptr;
        PyObject* value = nullptr;
        Py_ssize_t at_name = 0;
        while (PyDict_Next(names, &at_name, &name, &value)) {
            if (wanted.count(value) != 0) {
                found.emplace_back(py::reinterpret_borrow<py::dict>(names), py::reinterpret_borrow<py::object>(name));
            }
        }
    }
    return found;
}

}  // namespace vescale

PYBIND11_MODULE(_patching, module) {
    module.def("holders", &vescale::holders);
}
