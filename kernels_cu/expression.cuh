// What the printed text of an expression calls: integer division as in Python, loads of captured
// arrays, and the tables that bound one-sided parts of an expression on a tile. TABLE_BLOCK and
// BOX_LIMIT are printed before it (cuflash/gpu/source.py).
#pragma once

// Storage of captured arrays; the 16-bit floats are distinct types over their bits.
using element_bool = unsigned char;
using element_int8 = signed char;
using element_uint8 = unsigned char;
using element_int16 = short;
using element_uint16 = unsigned short;
using element_int32 = int;
using element_uint32 = unsigned int;
using element_int64 = long long;
using element_float32 = float;
using element_float64 = double;
using element_float16 = float16;
using element_bfloat16 = bfloat16;

template <typename Element>
__device__ __forceinline__ Element load_element(const Element* at) {
  return *at;
}
__device__ __forceinline__ float load_element(const float16* at) { return to_float(*at); }
__device__ __forceinline__ float load_element(const bfloat16* at) { return to_float(*at); }

// A gradient of a parameter, rounded once to the parameter's own type.
template <class Element>
__device__ __forceinline__ void store_element(Element* at, double value) {
  narrow(float(value), *at);
}
__device__ __forceinline__ void store_element(double* at, double value) { *at = value; }

__device__ __forceinline__ double word_as_real(long long word) {
  return __longlong_as_double(word);
}

// Python's // and %: rounded toward minus infinity, the remainder with the sign of the divisor.
// Division by zero gives 0, as in NumPy.
template <typename Integer>
__device__ __forceinline__ Integer floor_divide(Integer a, Integer b) {
  if (b == 0) return 0;
  const Integer quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}
template <typename Integer>
__device__ __forceinline__ Integer remainder(Integer a, Integer b) {
  return b == 0 ? 0 : a - floor_divide(a, b) * b;
}

// Products of reals that the compiler must not merge into a fused multiply-add: values and bounds
// of an expression have to round alike.
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }

template <typename Number>
__device__ __forceinline__ Number minimum(Number a, Number b) {
  return b < a ? b : a;
}
template <typename Number>
__device__ __forceinline__ Number maximum(Number a, Number b) {
  return b > a ? b : a;
}
template <typename Number>
__device__ __forceinline__ Number absolute(Number a) {
  return a < 0 ? -a : a;
}

// Whether all / any of a bool array's places in a box of indices are true. Sure only in a small
// box (BOX_LIMIT places); a larger one answers "perhaps".
template <int AXES>
struct BoxEnds {
  long long at[2 * AXES];  // low and high of each axis
};
template <int AXES>
struct BoxStrides {
  long long at[AXES];
};

template <int AXES, bool ALL>
__device__ inline bool box_test(
    const element_bool* data, const BoxEnds<AXES>& ends, const BoxStrides<AXES>& strides) {
  long long places = 1;
  for (int axis = 0; axis < AXES; ++axis)
    places *= ends.at[2 * axis + 1] - ends.at[2 * axis] + 1;
  if (places > BOX_LIMIT || places < 0) return !ALL;
  for (long long place = 0; place < places; ++place) {
    long long rest = place, offset = 0;
    for (int axis = 0; axis < AXES; ++axis) {
      const long long count = ends.at[2 * axis + 1] - ends.at[2 * axis] + 1;
      offset += (ends.at[2 * axis] + rest % count) * strides.at[axis];
      rest /= count;
    }
    if ((data[offset] != 0) != ALL) return !ALL;
  }
  return ALL;
}
template <int AXES>
__device__ inline bool box_all(
    const element_bool* data, BoxEnds<AXES> ends, BoxStrides<AXES> strides) {
  return box_test<AXES, true>(data, ends, strides);
}
template <int AXES>
__device__ inline bool box_any(
    const element_bool* data, BoxEnds<AXES> ends, BoxStrides<AXES> strides) {
  return box_test<AXES, false>(data, ends, strides);
}

// A table holds, for each row (batch item and head where they matter) and each block of TABLE_BLOCK
// tokens, the least and the greatest value: [row][block][2], 8 bytes each, from `base` on.
struct TableEntry {
  long long index, end, step, blocks, length, heads;
  long long first, last;  // tokens, both included
  int b, h;
  __device__ TableEntry(
      long long thread, long long threads, long long length_, long long batches, long long heads_)
      : index(thread), step(threads), length(length_), heads(heads_) {
    blocks = (length + TABLE_BLOCK - 1) / TABLE_BLOCK;
    end = batches * heads * blocks;
    place();
  }
  __device__ bool valid() const { return index < end; }
  __device__ void advance() {
    index += step;
    place();
  }
  __device__ void place() {
    if (index >= end) return;
    const long long row = index / blocks, block = index % blocks;
    b = int(row / heads);
    h = int(row % heads);
    first = block * TABLE_BLOCK;
    last = first + TABLE_BLOCK < length ? first + TABLE_BLOCK - 1 : length - 1;
  }
};

__device__ __forceinline__ long long real_as_word(double value) {
  return __double_as_longlong(value);
}
__device__ __forceinline__ void word_to(long long word, int& value) { value = int(word); }
__device__ __forceinline__ void word_to(long long word, long long& value) { value = word; }
__device__ __forceinline__ void word_to(long long word, double& value) {
  value = word_as_real(word);
}
__device__ __forceinline__ long long to_word(int value) { return value; }
__device__ __forceinline__ long long to_word(long long value) { return value; }
__device__ __forceinline__ long long to_word(double value) { return real_as_word(value); }

template <typename Number>
struct TableRange {
  Number low, high;
  bool empty = true, nan = false;
  __device__ void include(Number value) {
    nan |= value != value;
    low = empty || value < low ? value : low;
    high = empty || value > high ? value : high;
    empty = false;
  }
  __device__ void store(long long tables, long long base, long long index) {
    long long* entry = (long long*)tables + base + 2 * index;
    const long long infinity = 0x7ff0000000000000ll;
    // a NaN among reals makes the range unbounded, so that no comparison with it is certain
    entry[0] = nan ? (infinity | (long long)(1ull << 63)) : to_word(low);
    entry[1] = nan ? infinity : to_word(high);
  }
};

// Least and greatest over the tokens first..last, of the blocks that hold them.
template <typename Number>
__device__ inline void table_range(
    long long tables, long long base, long long row, long long length, long long first,
    long long last, Number& low, Number& high) {
  const long long blocks = (length + TABLE_BLOCK - 1) / TABLE_BLOCK;
  const long long* entries = (const long long*)tables + base + 2 * row * blocks;
  for (long long block = first / TABLE_BLOCK; block <= last / TABLE_BLOCK; ++block) {
    Number block_low, block_high;
    word_to(entries[2 * block], block_low);
    word_to(entries[2 * block + 1], block_high);
    const bool start = block == first / TABLE_BLOCK;
    low = start || block_low < low ? block_low : low;
    high = start || block_high > high ? block_high : high;
  }
}
