// Calls of operators from Inductor's generated Python code, without torch's dispatcher and its parser of arguments.
//
// fusebackend/native/direct_calls.py makes such a call when the code is loaded: what is the same at each call (numbers, texts, None) is read
// once. A call then reads its tensors and sizes, and runs the kernel. The Python symbols are weak: the library also loads where there is no
// Python. They are those of the limited API, so that one library serves every Python from 3.10 that has a GIL.
#ifdef FUSE_HAS_PYTHON
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <memory>

#include "common/direct_call.h"

#pragma weak PyCapsule_GetPointer
#pragma weak PyCapsule_New
#pragma weak PyCMethod_New
#pragma weak PyDict_GetItemWithError
#pragma weak PyErr_Clear
#pragma weak PyErr_Format
#pragma weak PyErr_NoMemory
#pragma weak PyErr_Occurred
#pragma weak PyEval_RestoreThread
#pragma weak PyEval_SaveThread
#pragma weak PyExc_TypeError
#pragma weak PyFloat_AsDouble
#pragma weak PyFloat_Type
#pragma weak PyList_Append
#pragma weak PyList_GetItem
#pragma weak PyList_New
#pragma weak PyList_SetItem
#pragma weak PyLong_AsLong
#pragma weak PyLong_AsLongLong
#pragma weak PyObject_Call
#pragma weak PyObject_CallFunctionObjArgs
#pragma weak PyObject_IsTrue
#pragma weak PySequence_GetItem
#pragma weak PySequence_Size
#pragma weak PyTuple_GetItem
#pragma weak PyTuple_New
#pragma weak PyTuple_SetItem
#pragma weak PyTuple_Size
#pragma weak PyType_GetFlags
#pragma weak PyType_IsSubtype
#pragma weak PyUnicode_AsUTF8AndSize
#pragma weak Py_DecRef
#pragma weak Py_IncRef
#pragma weak _Py_NoneStruct

namespace fusebackend::direct {
namespace {

struct Release {
  void operator()(PyObject* o) const { Py_DecRef(o); }
};
using Owned = std::unique_ptr<PyObject, Release>;

PyObject* kept(PyObject* o) {
  Py_IncRef(o);
  return o;
}

// What Python gives when a call is made. The references last as long as the process: calls are made by modules of generated code, which do too.
struct Call {
  Kernel kernel;
  PyObject *op, *arguments;  // the operator, and a tuple of all arguments: `open` in place of those that are given at each call
  PyObject *handles_of, *tensors_of;   // torch._C._aoti: from tensors to capsules of handles, and back
  PyObject *profiler, *profiler_name;  // the namespace in which a name tells whether a profiler runs
  PyObject* modes;                     // torch._C._len_torch_dispatch_stack
  std::vector<Argument> fixed;
  std::vector<size_t> open;
};

constexpr const char* kCapsule = "fusebackend.direct_call";

// Reads what is not a tensor. Tensors are appended to a list, and their number is returned, -1 if there is an error.
Py_ssize_t read(PyObject* value, Argument& into, PyObject* tensors) {
  using Kind = Argument::Kind;
  if (value == Py_None) return 0;
  if (PyLong_Check(value)) {
    into.kind = Kind::kInteger;
    into.integer = PyLong_AsLongLong(value), into.number = double(into.integer);
    return PyErr_Occurred() ? -1 : 0;
  }
  if (PyFloat_Check(value)) {
    into.kind = Kind::kNumber;
    into.number = PyFloat_AsDouble(value);
    return 0;
  }
  if (PyUnicode_Check(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) return -1;
    into.kind = Kind::kText;
    into.text.assign(text, size_t(size));
    return 0;
  }
  into.kind = PyList_Check(value) || PyTuple_Check(value) ? Kind::kList : Kind::kTensor;
  if (into.kind == Kind::kTensor) return PyList_Append(tensors, value) == 0 ? 1 : -1;
  const Py_ssize_t count = PySequence_Size(value);
  Py_ssize_t found = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Owned item(PySequence_GetItem(value, i));
    if (!item) return -1;
    if (PyLong_Check(item.get())) {
      into.integers.push_back(PyLong_AsLongLong(item.get()));
      if (PyErr_Occurred()) return -1;
    } else {
      if (PyList_Append(tensors, item.get()) != 0) return -1;
      ++found;
    }
  }
  return found;
}

// The call by torch's dispatcher: for whoever watches calls, and for errors, which are then torch's own.
PyObject* by_dispatcher(const Call& call, PyObject* const* given) {
  PyErr_Clear();
  const Py_ssize_t count = PyTuple_Size(call.arguments);
  const Owned all(PyTuple_New(count));
  if (!all) return nullptr;
  size_t next = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const bool open = next < call.open.size() && call.open[next] == size_t(i);
    PyTuple_SetItem(all.get(), i, kept(open ? given[next++] : PyTuple_GetItem(call.arguments, i)));
  }
  return PyObject_Call(call.op, all.get(), nullptr);
}

// Whether a profiler or a mode of torch's dispatcher wants to see the call.
bool watched(const Call& call) {
  PyObject* const profiling = PyDict_GetItemWithError(call.profiler, call.profiler_name);
  if (!profiling || PyObject_IsTrue(profiling) != 0) return true;
  const Owned modes(PyObject_CallFunctionObjArgs(call.modes, nullptr));
  return !modes || PyLong_AsLong(modes.get()) != 0;
}

PyObject* wrapped(const Call& call, const std::vector<Tensor>& results) {
  const Owned handles(PyList_New(Py_ssize_t(results.size())));
  for (size_t i = 0; handles && i < results.size(); ++i) {
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_new_tensor_handle(results[i].get(), &handle) != AOTI_TORCH_SUCCESS) return PyErr_NoMemory();
    PyList_SetItem(handles.get(), Py_ssize_t(i), PyCapsule_New(handle, nullptr, nullptr));
  }
  Owned tensors(handles ? PyObject_CallFunctionObjArgs(call.tensors_of, handles.get(), nullptr) : nullptr);
  if (!tensors || !call.kernel.one_result) return tensors.release();
  return kept(PyList_GetItem(tensors.get(), 0));
}

PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const Call& call = *static_cast<Call*>(PyCapsule_GetPointer(self, kCapsule));
  if (size_t(count) != call.open.size()) return PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are taken", count, Py_ssize_t(call.open.size()));
  if (watched(call)) return by_dispatcher(call, given);
  const Owned tensors(PyList_New(0));
  std::vector<Argument> read_now(call.open.size());
  std::vector<Py_ssize_t> counts(call.open.size());
  for (size_t i = 0; i < counts.size(); ++i)
    if (!tensors || (counts[i] = read(given[i], read_now[i], tensors.get())) < 0) return by_dispatcher(call, given);
  const Owned handles(PyObject_CallFunctionObjArgs(call.handles_of, tensors.get(), nullptr));
  if (!handles) return by_dispatcher(call, given);
  std::vector<const Argument*> arguments;
  for (const Argument& a : call.fixed) arguments.push_back(&a);
  Py_ssize_t next = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (Py_ssize_t t = 0; t < counts[i]; ++t, ++next)
      read_now[i].tensors.emplace_back(static_cast<AtenTensorHandle>(PyCapsule_GetPointer(PyList_GetItem(handles.get(), next), nullptr)));
    arguments[call.open[i]] = &read_now[i];
  }
  std::vector<Tensor> results;
  bool failed = false;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    results = call.kernel.call(arguments);
  } catch (...) {
    failed = true;
  }
  PyEval_RestoreThread(state);
  return failed ? by_dispatcher(call, given) : wrapped(call, results);
}

PyMethodDef method = {"direct_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL, nullptr};

}  // namespace
}  // namespace fusebackend::direct

// Whether there is a kernel, named as in `kernels()`.
extern "C" __attribute__((visibility("default"))) bool fusebackend_has_kernel(const char* name) { return fusebackend::direct::kernels().count(name) > 0; }

// A function of Python that calls a kernel, or null with Python's error set. `open` stands in `arguments` for what is given at each call; the rest is as in Call.
extern "C" __attribute__((visibility("default"))) PyObject* fusebackend_direct_call(const char* name, PyObject* op, PyObject* arguments, PyObject* open,
                                                                                    PyObject* handles_of, PyObject* tensors_of, PyObject* profiler,
                                                                                    PyObject* profiler_name, PyObject* modes) {
  using namespace fusebackend::direct;
  const auto found = kernels().find(name);
  if (found == kernels().end() || found->second.parameters != size_t(PyTuple_Size(arguments)))
    return PyErr_Format(PyExc_TypeError, "%s does not take %zd arguments", name, PyTuple_Size(arguments));
  auto call = std::make_unique<Call>(Call{found->second, op, arguments, handles_of, tensors_of, profiler, profiler_name, modes, {}, {}});
  call->fixed.resize(found->second.parameters);
  const Owned tensors(PyList_New(0));
  for (size_t i = 0; tensors && i < call->fixed.size(); ++i) {
    PyObject* const value = PyTuple_GetItem(arguments, Py_ssize_t(i));
    if (value == open)
      call->open.push_back(i);
    else if (read(value, call->fixed[i], tensors.get()) != 0)
      return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "argument %zd of %s can't be fixed", Py_ssize_t(i), name);
  }
  const Owned self(PyCapsule_New(call.get(), kCapsule, nullptr));
  PyObject* const function = self ? PyCMethod_New(&method, self.get(), nullptr, nullptr) : nullptr;
  if (!function) return nullptr;
  for (PyObject* o : {op, arguments, handles_of, tensors_of, profiler, profiler_name, modes}) Py_IncRef(o);
  call.release();
  return function;
}
#endif
