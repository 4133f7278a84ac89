typedef unsigned long long u64;
typedef unsigned int u32;

struct Segment { u64 source, target, bytes, period; };
struct Work {
  Segment segments[24];
  u64 buffer, buffer_bytes;
  double latency_ns, ns_per_byte;
  int peers[2], own[2];
  int ranks, pass_count, segment_count;
};

constexpr int LOADS_BUFFER = 1, STORES = 2, STORES_BUFFER = 4, SKIPS = 8;
// Chosen so that the channels alone move no less than NCCL's, and not much more: a block that waits
// for memory beside others then falls behind as NCCL's do.
constexpr u64 CHUNK = 262144;
constexpr int UNROLL = 4;
// What a channel may fall behind its link and still make up: the link's own buffering, and the
// grain of the timer.
constexpr double SLACK_NS = 4000.0;
// NCCL's kernels take 96 registers a thread, so that nothing else fits beside a block.
constexpr int HELD = 40;

template <int N> struct Bits { u32 word[N]; };

__device__ __forceinline__ void load(u64 at, Bits<4>& v) {
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(at) : "memory");
}
__device__ __forceinline__ void store(u64 at, const Bits<4>& v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
    :: "l"(at), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
}
__device__ __forceinline__ void load(u64 at, u32& v) {
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
}
__device__ __forceinline__ void store(u64 at, const u32& v) {
  asm volatile("st.global.u32 [%0], %1;" :: "l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void load(u64 at, unsigned short& v) {
  asm volatile("ld.volatile.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
}
__device__ __forceinline__ void store(u64 at, const unsigned short& v) {
  asm volatile("st.global.u16 [%0], %1;" :: "l"(at), "h"(v) : "memory");
}
__device__ __forceinline__ void load(u64 at, unsigned char& v) {
  v = *(volatile unsigned char*)at;
}
__device__ __forceinline__ void store(u64 at, const unsigned char& v) {
  *(volatile unsigned char*)at = v;
}
__device__ __forceinline__ u32 part(const Bits<4>& v) {
  return v.word[0] ^ v.word[1] ^ v.word[2] ^ v.word[3];
}
template <typename T> __device__ __forceinline__ u32 part(const T& v) { return v; }

__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
  return t;
}

// Move `bytes` from source + (offset + i) % period; offset + bytes <= period unless `wraps`.
template <typename T, int COUNT, bool WRAPS>
__device__ __forceinline__ void move(
    u64 source, u64 offset, u64 period, u64 target, u64 buffer, u64 bytes, int pass, u32& sink) {
  const u64 stride = (u64)blockDim.x * sizeof(T);
  for (u64 at = threadIdx.x * sizeof(T); at < bytes; at += COUNT * stride) {
    T value[COUNT];
    #pragma unroll
    for (int k = 0; k < COUNT; k++) {
      const u64 i = at + k * stride;
      if (i < bytes) load(source + (WRAPS ? (offset + i) % period : offset + i), value[k]);
    }
    if (pass & LOADS_BUFFER) {
      #pragma unroll
      for (int k = 0; k < COUNT; k++) {
        const u64 i = at + k * stride;
        T peer;
        if (i < bytes) { load(buffer + i, peer); sink ^= part(peer); }
      }
    }
    #pragma unroll
    for (int k = 0; k < COUNT; k++) {
      const u64 i = at + k * stride;
      if (i >= bytes) continue;
      if (target && (pass & STORES)) store(target + i, value[k]);
      if (pass & STORES_BUFFER) store(buffer + i, value[k]);
      if (!target) sink ^= part(value[k]);
    }
  }
}

extern "C" __global__ void onerank_standin_marker() {}

extern "C" __global__ void __launch_bounds__(640, 1)
onerank_standin_paced(const __grid_constant__ Work work) {
  u32 held[HELD];
  #pragma unroll
  for (int k = 0; k < HELD; k++) asm volatile("mov.u32 %0, %%clock;" : "=r"(held[k]));
  const u64 start = threadIdx.x == 0 ? now_ns() : 0;
  double due = work.latency_ns;
  const u64 buffer = work.buffer + blockIdx.x * work.buffer_bytes;
  u64 filled = 0;
  u32 sink = 0;
  for (int p = 0; p < work.pass_count; p++) {
    for (int s = 0; s < work.segment_count; s++) {
      const Segment segment = work.segments[s];
      const u64 odd = segment.source | segment.target | segment.bytes | segment.period | 16;
      const u64 unit = odd & (~odd + 1);  // the widest access that all of them allow
      const u64 units = segment.bytes / unit;
      u64 at = units * blockIdx.x / gridDim.x * unit;
      const u64 end = units * (blockIdx.x + 1) / gridDim.x * unit;
      const bool wraps = segment.period < CHUNK && segment.period < segment.bytes;
      while (at < end) {
        const u64 offset = at % segment.period;
        u64 bytes = min(CHUNK, end - at);
        if (!wraps) bytes = min(bytes, segment.period - offset);
        if (filled + CHUNK > work.buffer_bytes) filled = 0;
        const u64 target = segment.target ? segment.target + at : 0;
        const u64 slot = buffer + filled;
        const u64 own = bytes / unit / work.ranks * unit;
        for (int peers = 0; peers < 2; peers++) {
          const int pass = peers ? work.peers[p] : work.own[p];
          const u64 from = peers ? own : 0, count = peers ? bytes - own : own;
          if (pass & SKIPS) continue;
          #define MOVE(T, U, W) move<T, U, W>( \
            segment.source, offset + from, segment.period, target ? target + from : 0, \
            slot + from, count, pass, sink)
          if (wraps) {
            if (unit == 16) MOVE(Bits<4>, 1, true);
            else if (unit >= 4) MOVE(u32, 1, true);
            else if (unit == 2) MOVE(unsigned short, 1, true);
            else MOVE(unsigned char, 1, true);
          }
          else if (unit == 16) MOVE(Bits<4>, UNROLL, false);
          else if (unit >= 4) MOVE(u32, UNROLL, false);
          else if (unit == 2) MOVE(unsigned short, UNROLL, false);
          else MOVE(unsigned char, UNROLL, false);
        }
        at += bytes;
        filled += CHUNK;
        __syncthreads();
        if (threadIdx.x == 0) {  // to read the timer takes long
          due += bytes * work.ns_per_byte;
          double elapsed;
          do elapsed = (double)(now_ns() - start); while (elapsed < due);
          due = fmax(due, elapsed - SLACK_NS);  // a link does not catch up
        }
        __syncthreads();
      }
    }
  }
  if (threadIdx.x == 0) while ((double)(now_ns() - start) < due) {}
  if (work.segment_count < 0) {  // never: keeps the loads and the registers
    u64 at = work.buffer + threadIdx.x * 4;
    #pragma unroll
    for (int k = 0; k < HELD; k++) store(at + k * 4096, held[k]);
    store(at, sink);
  }
}
