// What each usual call of a replayed step costs the host: the same as `call` in quick.py, without Python. All else is left to that.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>

struct Expect {  // a call that a look at its arguments answers
  PyObject_HEAD
  PyObject* name;        // interned
  PyObject* named;       // a dictionary: constants by keyword
  PyObject* value;       // what it returns, where that is at no place
  PyObject* next_entry;  // the entry of the next call, or NULL: the step ends
  PyObject* next;        // the Expect of that; NULL: there is none, Python answers it
  Py_ssize_t size, place, array_count, constant_count;
  Py_ssize_t* arrays;               // position, place, position, place …
  Py_ssize_t* constant_positions;
  PyObject* constants;  // a tuple
};

struct State {  // of a recorder, which is a class below it
  PyObject_HEAD
  PyObject* expected;  // the next entry; None for none
  PyObject* quick;     // its Expect, or NULL
  PyObject* at;        // by place, what the script holds of this step: a list
  char inside;
  Py_ssize_t cursor, launched;
  unsigned long thread;
};

struct Quick {  // what stands in the place of a function or method
  PyObject_HEAD
  vectorcallfunc call;
  State* state;
  PyObject* name;   // interned
  PyObject* slow;   // answers what is not usual
  PyObject* ended;  // of the state: all calls of the step are answered
};

static PyTypeObject ExpectType, StateType, QuickType;

static int same(PyObject* a, PyObject* b) {
  if (a == b) return 1;
  if (Py_TYPE(a) != Py_TYPE(b)) return 0;
  PyObject* equal = PyObject_RichCompare(a, b, Py_EQ);
  const int found = equal ? PyObject_IsTrue(equal) : -1;
  Py_XDECREF(equal);
  if (found < 0) PyErr_Clear();
  return found > 0;
}

static bool usual(const Expect* e, PyObject* at, PyObject* const* args, PyObject* keys) {
  const Py_ssize_t places = PyList_GET_SIZE(at);
  for (Py_ssize_t i = 0; i < e->array_count; ++i) {
    const Py_ssize_t position = e->arrays[2 * i], place = e->arrays[2 * i + 1];
    if (place >= places || args[position] != PyList_GET_ITEM(at, place)) return false;
  }
  const Py_ssize_t given = keys ? PyTuple_GET_SIZE(keys) : 0;
  if (given != PyDict_GET_SIZE(e->named)) return false;
  for (Py_ssize_t i = 0; i < given; ++i) {
    PyObject* recorded = PyDict_GetItem(e->named, PyTuple_GET_ITEM(keys, i));
    if (!recorded || !same(args[e->size + i], recorded)) return false;
  }
  for (Py_ssize_t i = 0; i < e->constant_count; ++i)
    if (!same(args[e->constant_positions[i]], PyTuple_GET_ITEM(e->constants, i))) return false;
  return true;
}

static PyObject* answer(Quick* self, Expect* e) {
  State* state = self->state;
  PyObject* result = e->place >= 0 ? PyList_GET_ITEM(state->at, e->place) : e->value;
  Py_INCREF(result);
  ++state->cursor;
  PyObject *entry = state->expected, *quick = state->quick;
  state->expected = e->next_entry ? e->next_entry : Py_None;
  Py_INCREF(state->expected);
  state->quick = e->next;
  Py_XINCREF(state->quick);
  const bool over = !e->next_entry;
  Py_DECREF(entry);
  Py_DECREF(quick);  // which may have held `e`
  if (over) {
    PyObject* ended = PyObject_CallOneArg(self->ended, (PyObject*)state);
    if (!ended) {
      Py_DECREF(result);
      return nullptr;
    }
    Py_DECREF(ended);
  }
  return result;
}

static PyObject* quick_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* keys) {
  Quick* self = (Quick*)callable;
  State* state = self->state;
  if (state->quick && !state->inside && PyThread_get_thread_ident() == state->thread) {
    Expect* e = (Expect*)state->quick;
    if (e->name == self->name && e->size == PyVectorcall_NARGS(flags) && state->at && PyList_CheckExact(state->at)) {
      Py_INCREF(e);  // a comparison may run code of the script's
      const bool found = usual(e, state->at, args, keys) && state->quick == (PyObject*)e;
      PyObject* result = found ? answer(self, e) : nullptr;
      Py_DECREF(e);
      if (found) return result;
    }
  }
  return PyObject_Vectorcall(self->slow, args, flags & ~PY_VECTORCALL_ARGUMENTS_OFFSET, keys);
}

static PyObject* quick_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *state, *name, *slow, *ended;
  if (!PyArg_ParseTuple(args, "O!UOO", &StateType, &state, &name, &slow, &ended)) return nullptr;
  Quick* self = (Quick*)type->tp_alloc(type, 0);
  if (!self) return nullptr;
  self->call = quick_call;
  Py_INCREF(name);
  PyUnicode_InternInPlace(&name);
  self->state = (State*)Py_NewRef(state), self->name = name, self->slow = Py_NewRef(slow), self->ended = Py_NewRef(ended);
  return (PyObject*)self;
}

static int quick_traverse(Quick* self, visitproc visit, void* arg) {
  Py_VISIT(self->state);
  Py_VISIT(self->slow);
  Py_VISIT(self->ended);
  return 0;
}

static int quick_clear(Quick*) { return 0; }  // it may be called until it is gone: what it needs breaks no cycle of its own

static void quick_dealloc(Quick* self) {
  PyObject_GC_UnTrack(self);
  Py_XDECREF(self->state);
  Py_XDECREF(self->name);
  Py_XDECREF(self->slow);
  Py_XDECREF(self->ended);
  Py_TYPE(self)->tp_free(self);
}

static PyObject* quick_get(PyObject* self, PyObject* of, PyObject*) {
  return !of || of == Py_None ? Py_NewRef(self) : PyMethod_New(self, of);
}

static PyObject* pairs(PyObject* given, Py_ssize_t width, Py_ssize_t size, Py_ssize_t** into, PyObject** objects) {
  const Py_ssize_t count = PyTuple_GET_SIZE(given);
  *into = (Py_ssize_t*)PyMem_Malloc((width * count + 1) * sizeof(Py_ssize_t));
  if (!*into) return PyErr_NoMemory();
  if (objects && !(*objects = PyTuple_New(count))) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* pair = PyTuple_GET_ITEM(given, i);
    const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0));
    if (position < 0 || position >= size) return PyErr_Format(PyExc_ValueError, "position %zd of %zd", position, size);
    (*into)[width * i] = position;
    if (objects)
      PyTuple_SET_ITEM(*objects, i, Py_NewRef(PyTuple_GET_ITEM(pair, 1)));
    else
      (*into)[width * i + 1] = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
  }
  return PyErr_Occurred() ? nullptr : given;
}

static PyObject* expect_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *name, *arrays, *constants, *named, *value;
  Py_ssize_t size, place;
  if (!PyArg_ParseTuple(args, "UnO!O!O!nO", &name, &size, &PyTuple_Type, &arrays, &PyTuple_Type, &constants, &PyDict_Type, &named,
                        &place, &value))
    return nullptr;
  Expect* self = (Expect*)type->tp_alloc(type, 0);
  if (!self) return nullptr;
  Py_INCREF(name);
  PyUnicode_InternInPlace(&name);
  self->name = name, self->named = Py_NewRef(named), self->value = Py_NewRef(value), self->size = size, self->place = place;
  self->array_count = PyTuple_GET_SIZE(arrays), self->constant_count = PyTuple_GET_SIZE(constants);
  if (!pairs(arrays, 2, size, &self->arrays, nullptr) ||
      !pairs(constants, 1, size, &self->constant_positions, &self->constants)) {
    Py_DECREF(self);
    return nullptr;
  }
  return (PyObject*)self;
}

static PyObject* expect_behind(Expect* self, PyObject* args) {
  PyObject *entry, *next;
  if (!PyArg_ParseTuple(args, "OO", &entry, &next)) return nullptr;
  Py_XSETREF(self->next_entry, Py_NewRef(entry));
  Py_XSETREF(self->next, Py_IsNone(next) ? nullptr : Py_NewRef(next));
  Py_RETURN_NONE;
}

static int expect_traverse(Expect* self, visitproc visit, void* arg) {
  Py_VISIT(self->named);
  Py_VISIT(self->value);
  Py_VISIT(self->next_entry);
  Py_VISIT(self->next);
  Py_VISIT(self->constants);
  return 0;
}

static int expect_clear(Expect* self) {
  Py_CLEAR(self->next_entry);
  Py_CLEAR(self->next);
  return 0;
}

static void expect_dealloc(Expect* self) {
  PyObject_GC_UnTrack(self);
  Py_TRASHCAN_BEGIN(self, expect_dealloc);
  expect_clear(self);
  Py_XDECREF(self->name);
  Py_XDECREF(self->named);
  Py_XDECREF(self->value);
  Py_XDECREF(self->constants);
  PyMem_Free(self->arrays);
  PyMem_Free(self->constant_positions);
  Py_TYPE(self)->tp_free(self);
  Py_TRASHCAN_END;
}

static PyObject* state_new(PyTypeObject* type, PyObject*, PyObject*) {
  State* self = (State*)type->tp_alloc(type, 0);
  if (self) self->expected = Py_NewRef(Py_None), self->at = PyList_New(0), self->thread = PyThread_get_thread_ident();
  return (PyObject*)self;
}

static PyObject* state_expected(State* self, void*) { return Py_NewRef(self->expected); }

static int state_expect(State* self, PyObject* entry, void*) {
  if (!entry) entry = Py_None;
  PyObject* quick = nullptr;
  if (entry != Py_None) {
    quick = PyObject_GetAttrString(entry, "native");
    if (!quick) return -1;
    if (Py_TYPE(quick) != &ExpectType) Py_CLEAR(quick);
  }
  Py_XSETREF(self->quick, quick);
  Py_SETREF(self->expected, Py_NewRef(entry));
  return 0;
}

static int state_traverse(State* self, visitproc visit, void* arg) {
  Py_VISIT(self->expected);
  Py_VISIT(self->quick);
  Py_VISIT(self->at);
  return 0;
}

static int state_clear(State* self) {
  Py_CLEAR(self->quick);
  Py_CLEAR(self->at);
  return 0;
}

static void state_dealloc(State* self) {
  PyObject_GC_UnTrack(self);
  state_clear(self);
  Py_XDECREF(self->expected);
  Py_TYPE(self)->tp_free(self);
}

static PyMemberDef state_members[] = {
    {"at", T_OBJECT_EX, offsetof(State, at), 0, nullptr},
    {"inside", T_BOOL, offsetof(State, inside), 0, nullptr},
    {"cursor", T_PYSSIZET, offsetof(State, cursor), 0, nullptr},
    {"launched", T_PYSSIZET, offsetof(State, launched), 0, nullptr},
    {"thread", T_ULONG, offsetof(State, thread), READONLY, nullptr},
    {nullptr}};
static PyGetSetDef state_properties[] = {{"expected", (getter)state_expected, (setter)state_expect, nullptr, nullptr}, {nullptr}};
static PyMethodDef expect_methods[] = {{"behind", (PyCFunction)expect_behind, METH_VARARGS, nullptr}, {nullptr}};

#define TEXT(name) #name
#define NAME(name) TEXT(name)
#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, NAME(ADVISOR_NATIVE), nullptr, -1, nullptr};

PyMODINIT_FUNC INIT(ADVISOR_NATIVE)() {
  ExpectType.tp_name = "advisor.Expect";
  ExpectType.tp_basicsize = sizeof(Expect);
  ExpectType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  ExpectType.tp_new = expect_new;
  ExpectType.tp_dealloc = (destructor)expect_dealloc;
  ExpectType.tp_traverse = (traverseproc)expect_traverse;
  ExpectType.tp_clear = (inquiry)expect_clear;
  ExpectType.tp_methods = expect_methods;

  StateType.tp_name = "advisor.State";
  StateType.tp_basicsize = sizeof(State);
  StateType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE;
  StateType.tp_new = state_new;
  StateType.tp_dealloc = (destructor)state_dealloc;
  StateType.tp_traverse = (traverseproc)state_traverse;
  StateType.tp_clear = (inquiry)state_clear;
  StateType.tp_members = state_members;
  StateType.tp_getset = state_properties;

  QuickType.tp_name = "advisor.Quick";
  QuickType.tp_basicsize = sizeof(Quick);
  QuickType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  QuickType.tp_new = quick_new;
  QuickType.tp_dealloc = (destructor)quick_dealloc;
  QuickType.tp_traverse = (traverseproc)quick_traverse;
  QuickType.tp_clear = (inquiry)quick_clear;
  QuickType.tp_descr_get = quick_get;
  QuickType.tp_call = PyVectorcall_Call;
  QuickType.tp_vectorcall_offset = offsetof(Quick, call);

  PyObject* module = PyModule_Create(&definition);
  if (!module || PyModule_AddType(module, &ExpectType) < 0 || PyModule_AddType(module, &StateType) < 0 ||
      PyModule_AddType(module, &QuickType) < 0)
    return nullptr;
  return module;
}
