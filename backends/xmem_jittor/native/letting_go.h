// Lets go of Python objects where tensors are freed: inside of Jittor's executor nothing of Python
// may run, and what is let go of (a depot) runs its finalizers.
#pragma once
#include <vector>

#include <Python.h>

namespace {

// What the interpreter lets go of when it gets to it. All at once: it takes few calls of this kind.
struct Waiting {
    std::vector<PyObject*> objects;
    bool is_known = false;
};

Waiting& waiting_to_go() {
    static auto* one = new Waiting;  // tensors may outlive static objects
    return *one;
}

int let_all_go(void*) {
    std::vector<PyObject*> objects;
    objects.swap(waiting_to_go().objects);
    waiting_to_go().is_known = false;
    for (auto* object : objects) Py_DECREF(object);
    return 0;
}

// Lets go of a reference soon. Whoever calls holds the interpreter's lock.
void let_go_later(PyObject* object) {
    if (!Py_IsInitialized()) return;
    auto& waiting = waiting_to_go();
    waiting.objects.push_back(object);
    if (!waiting.is_known) waiting.is_known = Py_AddPendingCall(let_all_go, nullptr) == 0;
}

}  // namespace
