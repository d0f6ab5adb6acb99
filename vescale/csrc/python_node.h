// Autograd nodes that hold Python objects.

#pragma once

#include "interpreter.h"
#include "torch_versions.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

namespace vescale {

class PythonNode : public torch::autograd::Node {
  public:
    explicit PythonNode(std::vector<py::object> objects) : objects_(std::move(objects)) {}

    ~PythonNode() override {
        if (!Py_IsInitialized()) {  // the interpreter, and what it owned, has gone
            for (auto& object : objects_) {
                object.release();
            }
            return;
        }
        Gil gil;
        objects_.clear();
    }

  protected:
    const py::object& held(std::size_t i) const { return objects_[i]; }

  private:
    std::vector<py::object> objects_;
};

inline py::object to_object(const at::Tensor& tensor) {
    return owned(THPVariable_Wrap(tensor));
}

inline at::Tensor to_tensor(const py::object& object) {
    return object.is_none() ? at::Tensor() : tensor_of(object);
}

// "<requester>: gradient"
inline py::object gradient_of(const py::object& requester) {
    return owned(PyUnicode_FromFormat("%S: gradient", requester.ptr()));
}

}  // namespace vescale
