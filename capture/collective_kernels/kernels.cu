// The kernel that emulates a collective: it moves the bytes that NCCL's kernel would, in the time of
// the network, occupies as much of a multiprocessor, and draws the power of the link.

typedef unsigned long long u64;
typedef unsigned int u32;

struct Segment { u64 source, target, bytes, period; };
struct Work {
  Segment segments[24];
  u64 buffer, buffer_bytes;
  double latency_ns, ns_per_byte;
  int peers[2], own[2];
  int ranks, pass_count, segment_count, movers;
};

constexpr int LOADS_BUFFER = 1, STORES = 2, STORES_BUFFER = 4, SKIPS = 8;
constexpr u64 CHUNK = 262144;
// NCCL's unroll factors (`ncclCollUnroll`, src/include/device.h). The number of bytes in flight
// determines the share of memory bandwidth that a kernel gets next to others.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
constexpr int UNROLL = 4;
#else
constexpr int UNROLL = __CUDA_ARCH__ / 100 == 12 ? 6 : 8;
#endif
constexpr int LANES = 32;
// Delay behind the link that a channel may still make up: the link's buffering, and the resolution
// of the timer.
constexpr double SLACK_NS = 4000.0;

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

// One thread's loads and stores.
struct Place { u64 source, target, buffer; };

// Move COUNT elements, one per row of a warp.
template <typename T, int COUNT>
__device__ __forceinline__ void step(const Place& place, int pass, u32& sink) {
  constexpr int ROW = LANES * sizeof(T);
  T value[COUNT];
  #pragma unroll
  for (int k = 0; k < COUNT; k++) load(place.source + k * ROW, value[k]);
  if (pass & LOADS_BUFFER) {
    T peer[COUNT];
    #pragma unroll
    for (int k = 0; k < COUNT; k++) load(place.buffer + k * ROW, peer[k]);
    #pragma unroll
    for (int k = 0; k < COUNT; k++) sink ^= part(peer[k]);
  }
  if (place.target && (pass & STORES)) {
    #pragma unroll
    for (int k = 0; k < COUNT; k++) store(place.target + k * ROW, value[k]);
  }
  if (pass & STORES_BUFFER) {
    #pragma unroll
    for (int k = 0; k < COUNT; k++) store(place.buffer + k * ROW, value[k]);
  }
  #pragma unroll
  for (int k = 0; k < COUNT; k++) sink ^= part(value[k]);
}

// Move `bytes` from source + (offset + i) % period; offset + bytes <= period unless WRAPS.
template <typename T, int COUNT, bool WRAPS>
__device__ __forceinline__ void move(
    u64 source, u64 offset, u64 period, u64 target, u64 buffer, u64 bytes, int movers, int pass,
    u32& sink) {
  constexpr int ROW = LANES * sizeof(T);
  const u64 stride = (u64)(movers / LANES) * COUNT * ROW;
  u64 at = threadIdx.x / LANES * (COUNT * ROW) + threadIdx.x % LANES * sizeof(T);
  if (!WRAPS)
    for (; at + (COUNT - 1) * ROW < bytes; at += stride)
      step<T, COUNT>({source + offset + at, target ? target + at : 0, buffer + at}, pass, sink);
  for (; at < bytes; at += stride)
    for (u64 i = at; i < bytes && i < at + COUNT * ROW; i += ROW) {
      const u64 from = WRAPS ? (offset + i) % period : offset + i;
      step<T, 1>({source + from, target ? target + i : 0, buffer + i}, pass, sink);
    }
}

// Barrier of the moving threads only.
__device__ __forceinline__ void meet(int movers) {
  asm volatile("bar.sync 1, %0;" :: "r"(movers) : "memory");
}

// Draw the power of a link while bytes cross it (`crossed`): three warps multiply registers on the
// tensor cores, which a multiprocessor that moves bytes leaves idle. A kernel on one GPU cannot use
// the link itself. Next to NCCL's collectives an H200 drew 30 to 40 W more than next to kernels that
// only moved the bytes, and at its power limit it clocked 2 to 3% lower
// (benchmarks/results/2026-11-22-collectives-under-load-2xh200.txt).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr u32 BYTES_PER_PRODUCT = 44;
constexpr int ROUND = 128, AT_ONCE = 8;

// Two numbers of magnitude 0.5 to 1, of random sign: zeros would draw little power.
__device__ __forceinline__ u32 random_pair(u32 k) {
  return (clock() + threadIdx.x * 7919u + k) * 2654435761u & 0x807f807fu | 0x3f003f00u;
}

__device__ __forceinline__ void draw(
    volatile const u32& crossed, volatile const bool& done, u64 nowhere) {
  u32 factor[6], sum[AT_ONCE][4];
  #pragma unroll
  for (int k = 0; k < 6; k++) factor[k] = random_pair(k);
  #pragma unroll
  for (int k = 0; k < 4 * AT_ONCE; k++) sum[k / 4][k % 4] = random_pair(k);
  for (u32 drawn = 0; !done;) {
    if ((int)(crossed - drawn) <= 0) { __nanosleep(100); continue; }
    drawn += ROUND * BYTES_PER_PRODUCT;
    #pragma unroll
    for (int k = 0; k < ROUND; k++) {
      u32* to = sum[k % AT_ONCE];  // several independent ones, to hide their latency
      asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "r"(factor[0]), "r"(factor[1]), "r"(factor[2]), "r"(factor[3]),
          "r"(factor[4]), "r"(factor[5]));
    }
  }
  u32 sink = 0;
  #pragma unroll
  for (int k = 0; k < 4 * AT_ONCE; k++) sink ^= sum[k / 4][k % 4];  // else the compiler would remove some
  if (nowhere) store(nowhere, sink);
}
#else
__device__ __forceinline__ void draw(volatile const u32&, volatile const bool&, u64) {}
#endif

extern "C" __global__ void onerank_standin_marker() {}

extern "C" __global__ void __launch_bounds__(640, 1)
onerank_standin_paced(const __grid_constant__ Work work) {
  __shared__ volatile u32 crossed;
  __shared__ volatile bool done;
  if (threadIdx.x == 0) { crossed = 0; done = false; }
  __syncthreads();
  if (threadIdx.x >= work.movers) {
    draw(crossed, done, work.segment_count < 0 ? work.buffer : 0);
    return;
  }
  const u64 start = threadIdx.x == 0 ? now_ns() : 0;
  double due = work.latency_ns;
  const u64 buffer = work.buffer + blockIdx.x * work.buffer_bytes;
  u64 filled = 0;
  u32 sink = 0;
  for (int p = 0; p < work.pass_count; p++) {
    const bool all_cross = work.own[p] == work.peers[p];
    for (int s = 0; s < work.segment_count; s++) {
      const Segment segment = work.segments[s];
      const u64 odd = segment.source | segment.target | segment.bytes | segment.period | 16;
      const u64 unit = odd & (~odd + 1);  // the widest aligned access
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
        if (threadIdx.x == 0) crossed = crossed + (u32)(all_cross ? bytes : bytes - own);
        for (int peers = 0; peers < 2; peers++) {
          const int pass = peers ? work.peers[p] : work.own[p];
          const u64 from = peers ? own : 0, count = peers ? bytes - own : own;
          if (pass & SKIPS) continue;
          #define MOVE(T, U, W) move<T, U, W>( \
            segment.source, offset + from, segment.period, target ? target + from : 0, \
            slot + from, count, work.movers, pass, sink)
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
        meet(work.movers);
        if (threadIdx.x == 0) {  // reading the timer is slow
          due += bytes * work.ns_per_byte;
          double elapsed;
          do elapsed = (double)(now_ns() - start); while (elapsed < due);
          due = fmax(due, elapsed - SLACK_NS);  // a link does not make up for lost time
        }
        meet(work.movers);
      }
    }
  }
  if (threadIdx.x == 0) {
    while ((double)(now_ns() - start) < due) {}
    done = true;
  }
  if (work.segment_count < 0) store(work.buffer, sink);  // never: keeps the loads
}
