// What the library of module hooks calls in the library of the dispatcher, whose tables are its own.

#pragma once

#include "interpreter.h"

namespace vescale {

// Each returns a new reference; null without an error: Python has to do it. Errors are C++ exceptions.
struct BoundaryFunctions {
    // (DTensor, target, stages, requester): the tensor behind a boundary where nothing moves.
    PyObject* (*pass)(PyObject*, PyObject*, PyObject*, PyObject*);
    // (DTensor, target, stages, requester, outdated): `convert`.
    PyObject* (*convert)(PyObject*, PyObject*, PyObject*, PyObject*, PyObject*);
    // Puts the interned spec in the place of an equal one.
    void (*intern)(PyObject*);
};

constexpr const char* kBoundaryFunctions = "vescale.boundary_functions";

inline const BoundaryFunctions*& boundary_functions() {
    static const BoundaryFunctions* found = nullptr;
    return found;
}

}  // namespace vescale
