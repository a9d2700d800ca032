// NCCL as torch sees it, between processes of one machine, on the device that computes nothing.
//
// Data crosses POSIX shared memory. Operations run in order, on a worker thread for each communicator,
// and streams and events know what is under way on them: so the functions of the runtime that wait for
// a device stand here, too, and this library comes before the runtime's. As of NCCL, what is never
// joined waits until it is aborted by another thread, and to destroy a communicator is to wait for it.
// Ranks that call different collectives are told of it, and hang. NULL_NCCL_DEBUG=1 tells every
// operation; NULL_NCCL_MEMORY is what a communicator takes of the device, in bytes; with
// NULL_NCCL_REMOTE=1 a rank has an error as soon as another aborts, as over a network between machines.
#include <nccl.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
using Clock = std::chrono::steady_clock;

namespace {
const bool kDebug = std::getenv("NULL_NCCL_DEBUG") != nullptr;
const bool kRemote = std::getenv("NULL_NCCL_REMOTE") != nullptr;
const size_t kMemory =
    std::getenv("NULL_NCCL_MEMORY") ? std::strtoull(std::getenv("NULL_NCCL_MEMORY"), nullptr, 10) : 0;
constexpr size_t kSlot = 1 << 20, kRing = 1 << 16;
constexpr int kMostRanks = 16;
struct Told {
  int what, dtype, op, root;
  uint64_t count;
};  // what a rank is about to do
struct alignas(64) Rank {
  std::atomic<uint64_t> at;
  Told told;
};
struct alignas(64) Ring {
  std::atomic<uint64_t> head, tail;
};
struct Header {
  std::atomic<uint32_t> epoch, aborted;
  Rank ranks[kMostRanks];
  Ring rings[kMostRanks * kMostRanks];
};
size_t slots_at() { return (sizeof(Header) + 4095) / 4096 * 4096; }
size_t rings_at(int n) { return slots_at() + n * kSlot; }
size_t whole(int n) { return rings_at(n) + size_t(n) * n * kRing; }

void wake(std::atomic<uint32_t>* w) {
  w->fetch_add(1);
  syscall(SYS_futex, w, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}
void doze(std::atomic<uint32_t>* w, uint32_t seen) {
  timespec t{0, 100000000};
  syscall(SYS_futex, w, FUTEX_WAIT, seen, &t, nullptr, 0);
}
struct Operation {
  bool done = false;
  ncclResult_t result = ncclSuccess;
  Clock::time_point when;
  std::vector<std::shared_ptr<Operation>> deps;
  std::function<ncclResult_t()> work;
};
using Pending = std::shared_ptr<Operation>;
std::mutex& guard = *new std::mutex;  // of what follows and of all `done`
std::condition_variable& changed = *new std::condition_variable;
auto& streams = *new std::map<cudaStream_t, std::vector<Pending>>;
struct Event {
  std::vector<Pending> ops;
  Clock::time_point when;
};
auto& events = *new std::map<cudaEvent_t, Event>;
thread_local std::string last_error;

void prune(std::vector<Pending>& v) {
  std::vector<Pending> left;
  for (auto& o : v)
    if (!o->done) left.push_back(o);
  v.swap(left);
}
void wait_all(std::unique_lock<std::mutex>& lock, std::vector<Pending> v) {
  for (auto& o : v) changed.wait(lock, [&] { return o->done; });
}
}  // namespace

struct ncclComm {
  Header* h;
  int n, rank, device;
  std::string name;
  uint64_t at = 0;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{0};
  std::mutex m;
  std::condition_variable c;
  std::deque<Pending> queue;
  bool closing = false, idle = true;
  std::map<int, std::pair<double, void*>> premul;
  int next_op = 5;
  void* memory = nullptr;
  char* slot(int r) { return reinterpret_cast<char*>(h) + slots_at() + r * kSlot; }
  char* ring(int s, int d) {
    return reinterpret_cast<char*>(h) + rings_at(n) + (size_t(s) * n + d) * kRing;
  }
  Ring& state(int s, int d) { return h->rings[s * kMostRanks + d]; }
  bool barrier() {  // false: aborted
    h->ranks[rank].at = ++at;
    wake(&h->epoch);
    for (;;) {
      uint32_t seen = h->epoch;
      bool all = true;
      for (int r = 0; r < n; ++r) all = all && h->ranks[r].at >= at;
      if (all) return true;
      if (aborted) return false;
      doze(&h->epoch, seen);
    }
  }
  bool tell(Told t) {  // also the first barrier of an operation
    if (kDebug)
      fprintf(stderr, "[null nccl %s rank %d/%d] what %d count %lu dtype %d op %d root %d\n",
              name.c_str(), rank, n, t.what, t.count, t.dtype, t.op, t.root);
    h->ranks[rank].told = t;
    if (!barrier()) return false;
    for (int r = 0; r < n; ++r) {
      Told& o = h->ranks[r].told;
      if (o.what != t.what || o.count != t.count || o.dtype != t.dtype || o.op != t.op ||
          o.root != t.root) {
        fprintf(stderr,
                "NULL NCCL %s: COLLECTIVES DIFFER: rank %d what %d count %lu dtype %d op %d root %d; "
                "rank %d what %d count %lu dtype %d op %d root %d\n",
                name.c_str(), rank, t.what, t.count, t.dtype, t.op, t.root, r, o.what, o.count, o.dtype,
                o.op, o.root);
        error = ncclInternalError;
        while (!aborted) usleep(100000);
        return false;
      }
    }
    return barrier();
  }
  void run() {
    for (;;) {
      Pending op;
      {
        std::unique_lock<std::mutex> l(m);
        idle = true;
        c.notify_all();
        c.wait(l, [&] { return closing || !queue.empty(); });
        if (queue.empty()) return;
        op = queue.front();
        queue.pop_front();
        idle = false;
      }
      {
        std::unique_lock<std::mutex> l(guard);
        wait_all(l, op->deps);
      }
      ncclResult_t r = aborted ? ncclInternalError : op->work();
      if (r != ncclSuccess) error = r;
      {
        std::lock_guard<std::mutex> l(guard);
        op->deps.clear();
        op->result = r;
        op->when = Clock::now();
        op->done = true;
      }
      changed.notify_all();
    }
  }
  ncclResult_t put(std::function<ncclResult_t()> work, cudaStream_t s) {
    if (aborted) {
      last_error = "communicator was aborted";
      return ncclInvalidUsage;
    }
    auto op = std::make_shared<Operation>();
    op->work = std::move(work);
    {
      std::lock_guard<std::mutex> l(guard);
      auto& v = streams[s];
      prune(v);
      op->deps = v;
      v.push_back(op);
    }
    {
      std::lock_guard<std::mutex> l(m);
      queue.push_back(op);
    }
    c.notify_all();
    return ncclSuccess;
  }
  void drain() {
    std::unique_lock<std::mutex> l(m);
    c.wait(l, [&] { return queue.empty() && idle; });
  }
};

namespace {
size_t width(int d) {
  switch (d) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}
struct BFloat {
  uint16_t v;
};
struct Half {
  uint16_t v;
};
template <class T>
struct Num {
  using A = T;
  static T get(T x) { return x; }
  static T put(A x) { return x; }
};
template <>
struct Num<BFloat> {
  using A = float;
  static float get(BFloat x) {
    uint32_t u = uint32_t(x.v) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  static BFloat put(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return {0x7fff};
    u += 0x7fff + ((u >> 16) & 1);
    return {uint16_t(u >> 16)};
  }
};
template <>
struct Num<Half> {
  using A = float;
  static float get(Half x) {
    _Float16 h;
    memcpy(&h, &x, 2);
    return float(h);
  }
  static Half put(float f) {
    _Float16 h = f;
    Half x;
    memcpy(&x, &h, 2);
    return x;
  }
};
struct How {
  int op;
  bool pre;
  double factor;
  int post;
};
template <class T>
void reduce(ncclComm* c, char* to, size_t offset, size_t count, How how) {
  using N = Num<T>;
  T* out = reinterpret_cast<T*>(to);
  for (size_t i = 0; i < count; ++i) {
    auto get = [&](int r) {
      auto x = N::get(reinterpret_cast<T*>(c->slot(r) + offset)[i]);
      if (how.pre) x = N::get(N::put(x * typename N::A(how.factor)));
      return x;
    };
    auto a = get(0);
    for (int r = 1; r < c->n; ++r) {
      auto b = get(r);
      switch (how.op) {
        case ncclSum: a = a + b; break;
        case ncclProd: a = a * b; break;
        case ncclMax: a = (b > a || b != b) ? b : a; break;
        case ncclMin: a = (b < a || b != b) ? b : a; break;
      }
      a = N::get(N::put(a));
    }
    if (how.post) a = a / typename N::A(how.post);
    out[i] = N::put(a);
  }
}
void reduce(ncclComm* c, char* to, size_t offset, size_t count, int d, How how) {
  switch (d) {
    case ncclInt8: return reduce<int8_t>(c, to, offset, count, how);
    case ncclUint8: return reduce<uint8_t>(c, to, offset, count, how);
    case ncclInt32: return reduce<int32_t>(c, to, offset, count, how);
    case ncclUint32: return reduce<uint32_t>(c, to, offset, count, how);
    case ncclInt64: return reduce<int64_t>(c, to, offset, count, how);
    case ncclUint64: return reduce<uint64_t>(c, to, offset, count, how);
    case ncclFloat16: return reduce<Half>(c, to, offset, count, how);
    case ncclFloat32: return reduce<float>(c, to, offset, count, how);
    case ncclFloat64: return reduce<double>(c, to, offset, count, how);
    case ncclBfloat16: return reduce<BFloat>(c, to, offset, count, how);
    default: fprintf(stderr, "NULL NCCL: reduction of fp8\n");
  }
}
How how_of(ncclComm* c, int op, int d) {
  bool real = d >= ncclFloat16;
  if (op == ncclAvg) return real ? How{ncclSum, true, 1.0 / c->n, 0} : How{ncclSum, false, 1, c->n};
  if (op >= 5) {
    auto p = c->premul[op];
    double f = p.first;
    if (p.second) {
      switch (d) {
        case ncclFloat64: f = *static_cast<double*>(p.second); break;
        case ncclFloat32: f = *static_cast<float*>(p.second); break;
        case ncclFloat16: f = Num<Half>::get(*static_cast<Half*>(p.second)); break;
        case ncclBfloat16: f = Num<BFloat>::get(*static_cast<BFloat*>(p.second)); break;
        case ncclInt32: f = *static_cast<int*>(p.second); break;
        default: f = double(*static_cast<int64_t*>(p.second));
      }
    }
    return {ncclSum, true, f, 0};
  }
  return {op, false, 1, 0};
}
enum What {
  kAllReduce = 1,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter
};
ncclResult_t collective(ncclComm* c, What what, const void* send, void* recv, size_t count, int d,
                        int op, int root, How how) {
  auto fail = [] { return ncclInternalError; };
  if (!c->tell({what, d, op, root, count})) return fail();
  const char* in = static_cast<const char*>(send);
  char* out = static_cast<char*>(recv);
  const size_t w = width(d);
  const int n = c->n, me = c->rank;
  const bool split = what == kReduceScatter || what == kAllToAll || what == kScatter;
  const size_t most = (split ? kSlot / n / 8 * 8 : kSlot) / w;
  for (size_t at = 0; at < count; at += most) {
    const size_t k = std::min(most, count - at), bytes = k * w;
    if (split) {
      if (what != kScatter || me == root)
        for (int r = 0; r < n; ++r)
          memcpy(c->slot(me) + r * most * w, in + (r * count + at) * w, bytes);
    } else if (what != kBroadcast || me == root)
      memcpy(c->slot(me), in + at * w, bytes);
    if (!c->barrier()) return fail();
    switch (what) {
      case kAllReduce: reduce(c, out + at * w, 0, k, d, how); break;
      case kReduce:
        if (me == root) reduce(c, out + at * w, 0, k, d, how);
        break;
      case kBroadcast:
        if (me != root || out != in) memcpy(out + at * w, c->slot(root), bytes);
        break;
      case kGather:
        if (me != root) break;
      case kAllGather:
        for (int r = 0; r < n; ++r) memcpy(out + (r * count + at) * w, c->slot(r), bytes);
        break;
      case kReduceScatter: reduce(c, out + at * w, me * most * w, k, d, how); break;
      case kAllToAll:
        for (int r = 0; r < n; ++r)
          memcpy(out + (r * count + at) * w, c->slot(r) + me * most * w, bytes);
        break;
      case kScatter: memcpy(out + at * w, c->slot(root) + me * most * w, bytes); break;
    }
    if (!c->barrier()) return fail();
  }
  return ncclSuccess;
}
struct Part {
  bool sends;
  char* at;
  size_t left;
  int peer;
};
ncclResult_t exchange(ncclComm* c, std::vector<Part> parts) {
  for (;;) {
    uint32_t seen = c->h->epoch;
    bool moved = false, all = true;
    std::map<std::pair<bool, int>, bool> busy;
    for (auto& p : parts) {
      if (!p.left) continue;
      all = false;
      bool& b = busy[{p.sends, p.peer}];
      if (b) continue;
      b = true;
      int s = p.sends ? c->rank : p.peer, t = p.sends ? p.peer : c->rank;
      Ring& q = c->state(s, t);
      char* ring = c->ring(s, t);
      size_t k = std::min<uint64_t>(p.left, p.sends ? kRing - (q.tail - q.head) : q.tail - q.head);
      for (size_t i = 0; i < k;) {
        size_t o = ((p.sends ? q.tail : q.head) + i) % kRing, j = std::min(k - i, kRing - o);
        if (p.sends)
          memcpy(ring + o, p.at + i, j);
        else
          memcpy(p.at + i, ring + o, j);
        i += j;
      }
      if (k) {
        (p.sends ? q.tail : q.head) += k;
        p.at += k;
        p.left -= k;
        moved = true;
      }
    }
    if (all) return ncclSuccess;
    if (moved) {
      wake(&c->h->epoch);
      continue;
    }
    if (c->aborted) return ncclInternalError;
    doze(&c->h->epoch, seen);
  }
}
struct Queued {
  ncclComm* comm;
  cudaStream_t stream;
  bool p2p;
  Part part;
  std::function<ncclResult_t()> work;
};
thread_local int depth = 0;
thread_local std::vector<Queued> group;
ncclResult_t flush() {
  std::vector<Queued> now;
  now.swap(group);
  std::vector<std::pair<ncclComm*, cudaStream_t>> who;
  ncclResult_t result = ncclSuccess;
  for (auto& q : now)
    if (q.p2p) {
      bool there = false;
      for (auto& w : who) there = there || w.first == q.comm;
      if (!there) who.push_back({q.comm, q.stream});
    }
  for (auto& w : who) {
    std::vector<Part> parts;
    for (auto& q : now)
      if (q.p2p && q.comm == w.first) parts.push_back(q.part);
    ncclComm* c = w.first;
    auto r = c->put([c, parts] { return exchange(c, parts); }, w.second);
    if (r) result = r;
  }
  for (auto& q : now)
    if (!q.p2p) {
      auto r = q.comm->put(q.work, q.stream);
      if (r) result = r;
    }
  return result;
}
ncclResult_t issue(Queued q) {
  group.push_back(std::move(q));
  return depth ? ncclSuccess : flush();
}
ncclResult_t call(What what, const void* s, void* r, size_t count, ncclDataType_t d, int op, int root,
                  ncclComm* c, cudaStream_t st) {
  if (!c) return ncclInvalidArgument;
  if (c->aborted) {
    last_error = "communicator was aborted";
    return ncclInvalidUsage;
  }
  How how = what == kAllReduce || what == kReduce || what == kReduceScatter ? how_of(c, op, d)
                                                                            : How{0, false, 1, 0};
  return issue({c, st, false, {}, [=] {
                  return collective(c, what, s, r, count, d, op >= 5 ? 5 : op, root, how);
                }});
}
ncclComm* made(Header* h, int n, int rank, std::string name) {
  auto* c = new ncclComm;
  c->h = h;
  c->n = n;
  c->rank = rank;
  c->name = name;
  cudaGetDevice(&c->device);
  if (kMemory && cudaMalloc(&c->memory, kMemory) != cudaSuccess) {
    delete c;
    return nullptr;
  }
  return c;
}
void start(ncclComm* c) {
  std::thread([c] { c->run(); }).detach();
}
ncclResult_t init(ncclComm_t* comm, int n, std::string name, int rank) {
  if (n > kMostRanks || rank >= n || rank < 0) {
    last_error = "ranks";
    return ncclInvalidArgument;
  }
  int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, whole(n))) {
    last_error = "shm";
    return ncclSystemError;
  }
  auto* h = static_cast<Header*>(mmap(nullptr, whole(n), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  auto* c = made(h, n, rank, name);
  if (!c) {
    last_error = "Cuda failure 2 'out of memory'";
    return ncclUnhandledCudaError;
  }
  c->barrier();
  if (rank == 0) shm_unlink(name.c_str());
  start(c);
  *comm = c;
  return ncclSuccess;
}
std::string fresh() {
  std::random_device d;
  char b[64];
  snprintf(b, 64, "/nullnccl-%d-%08x%08x", getpid(), d(), d());
  return b;
}
}  // namespace

API ncclResult_t ncclGetVersion(int* v) {
  *v = NCCL_VERSION_CODE;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  strcpy(id->internal, fresh().c_str());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return init(c, n, id.internal, rank);
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank,
                                        ncclConfig_t*) {
  return init(c, n, id.internal, rank);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids,
                                          ncclConfig_t*) {
  return init(c, n, ids[0].internal, rank);
}
API ncclResult_t ncclCommInitAll(ncclComm_t* c, int n, const int* devices) {
  auto* h = static_cast<Header*>(
      mmap(nullptr, whole(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  // the futex is private then, but FUTEX_WAIT without PRIVATE_FLAG works on it within the process
  for (int r = 0; r < n; ++r) {
    c[r] = made(h, n, r, "in-process");
    if (!c[r]) return ncclUnhandledCudaError;
    c[r]->device = devices ? devices[r] : r;
    start(c[r]);
  }
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  struct Mine {
    int color, key;
    char name[64];
  };
  auto all = std::make_shared<std::vector<Mine>>(c->n);
  Mine mine{color, key, {}};
  strcpy(mine.name, fresh().c_str());
  *out = nullptr;
  auto result = std::make_shared<ncclResult_t>(ncclSuccess);
  auto r = c->put(
      [=] {
        return *result =
                   collective(c, kAllGather, &mine, all->data(), sizeof(Mine), ncclInt8, 0, 0, {});
      },
      reinterpret_cast<cudaStream_t>(c));
  if (r) return r;
  c->drain();
  if (*result) return *result;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int n = 0, rank = 0;
  for (int i = 0; i < c->n; ++i) {
    auto& o = (*all)[i];
    if (o.color != color) continue;
    ++n;
    if (o.key < key || (o.key == key && i < c->rank)) ++rank;
  }
  return init(out, n, std::string((*all)[0].name) + "-" + std::to_string(color), rank);
}
API ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) {
  last_error = "shrink is not in the stand-in";
  return ncclInvalidUsage;
}
API ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->n;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* n) {
  *n = c->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* n) {
  *n = c->device;
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) {
  if (!c) return ncclInvalidArgument;
  *e = kRemote && c->h->aborted ? ncclRemoteError : ncclResult_t(int(c->error));
  return ncclSuccess;
}
API ncclResult_t ncclCommFinalize(ncclComm_t c) {
  if (!c) return ncclSuccess;
  c->drain();
  return ncclSuccess;
}
static void free_own(void*);
static void close_down(ncclComm_t c) {
  c->drain();
  {
    std::lock_guard<std::mutex> l(c->m);
    c->closing = true;
  }
  c->c.notify_all();
  free_own(c->memory);
  c->memory = nullptr;
}
API ncclResult_t ncclCommDestroy(ncclComm_t c) {
  if (!c) return ncclSuccess;
  if (kDebug) fprintf(stderr, "[null nccl %s rank %d] destroy\n", c->name.c_str(), c->rank);
  close_down(c);
  return ncclSuccess;
}  // its memory stays: somebody may ask
API ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (!c) return ncclSuccess;
  if (kDebug) fprintf(stderr, "[null nccl %s rank %d] abort\n", c->name.c_str(), c->rank);
  c->error = ncclInternalError;
  c->aborted = true;
  c->h->aborted = 1;
  wake(&c->h->epoch);
  close_down(c);
  return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t r) {
  switch (r) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
API const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
API ncclResult_t ncclMemAlloc(void** p, size_t n) {
  return cudaMalloc(p, n) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
API ncclResult_t ncclMemFree(void* p) {
  cudaFree(p);
  return ncclSuccess;
}
API ncclResult_t ncclCommRegister(const ncclComm_t, void* p, size_t, void** h) {
  *h = p;
  return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclCommWindowRegister(ncclComm_t, void* p, size_t, ncclWindow_t* w, int) {
  *w = reinterpret_cast<ncclWindow_t>(p);
  return ncclSuccess;
}
API ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
API int ncclDevCommCreate() { return ncclInvalidUsage; }
API int ncclDevCommDestroy() { return ncclInvalidUsage; }
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* s, ncclDataType_t d,
                                          ncclScalarResidence_t where, ncclComm_t c) {
  int id = c->next_op++;
  c->premul[id] = {0, s};
  if (where == ncclScalarHostImmediate) {
    double f = how_of(c, id, d).factor;
    c->premul[id] = {f, nullptr};
  }
  *op = ncclRedOp_t(id);
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t d, ncclRedOp_t op,
                               ncclComm_t c, cudaStream_t st) {
  return call(kAllReduce, s, r, n, d, op, 0, c, st);
}
API ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t d, int root,
                               ncclComm_t c, cudaStream_t st) {
  return call(kBroadcast, s, r, n, d, 0, root, c, st);
}
API ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t d, int root, ncclComm_t c,
                           cudaStream_t st) {
  return call(kBroadcast, b, b, n, d, 0, root, c, st);
}
API ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t d, ncclRedOp_t op,
                            int root, ncclComm_t c, cudaStream_t st) {
  return call(kReduce, s, r, n, d, op, root, c, st);
}
API ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t d, ncclComm_t c,
                               cudaStream_t st) {
  return call(kAllGather, s, r, n, d, 0, 0, c, st);
}
API ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t d, ncclRedOp_t op,
                                   ncclComm_t c, cudaStream_t st) {
  return call(kReduceScatter, s, r, n, d, op, 0, c, st);
}
API ncclResult_t ncclAlltoAll(const void* s, void* r, size_t n, ncclDataType_t d, ncclComm_t c,
                              cudaStream_t st) {
  return call(kAllToAll, s, r, n, d, 0, 0, c, st);
}
API ncclResult_t ncclGather(const void* s, void* r, size_t n, ncclDataType_t d, int root, ncclComm_t c,
                            cudaStream_t st) {
  return call(kGather, s, r, n, d, 0, root, c, st);
}
API ncclResult_t ncclScatter(const void* s, void* r, size_t n, ncclDataType_t d, int root, ncclComm_t c,
                             cudaStream_t st) {
  return call(kScatter, s, r, n, d, 0, root, c, st);
}
API ncclResult_t ncclSend(const void* s, size_t n, ncclDataType_t d, int peer, ncclComm_t c,
                          cudaStream_t st) {
  return issue({c, st, true, {true, static_cast<char*>(const_cast<void*>(s)), n * width(d), peer}, {}});
}
API ncclResult_t ncclRecv(void* r, size_t n, ncclDataType_t d, int peer, ncclComm_t c,
                          cudaStream_t st) {
  return issue({c, st, true, {false, static_cast<char*>(r), n * width(d), peer}, {}});
}
API ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  if (depth <= 0) return ncclInvalidUsage;
  return --depth ? ncclSuccess : flush();
}
API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  depth = 0;
  group.clear();
  return ncclSuccess;
}

// ------------------------------------------- what of the runtime has to wait for operations under way
using Lock = std::unique_lock<std::mutex>;
static void wait_stream(cudaStream_t s) {
  Lock l(guard);
  auto at = streams.find(s);
  if (at != streams.end()) {
    auto v = at->second;
    wait_all(l, v);
  }
}
API void null_wait(cudaStream_t s) { wait_stream(s); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Lock l(guard);
  auto at = events.find(e);
  if (at != events.end() && !at->second.ops.empty()) {
    auto& v = streams[s];
    prune(v);
    for (auto& o : at->second.ops)
      if (!o->done) v.push_back(o);
  }
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  Lock l(guard);
  auto at = events.find(e);
  if (at != events.end()) {
    auto v = at->second.ops;
    wait_all(l, v);
  }
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* with) {
  wait_stream(s);
  f(with);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  wait_stream(s);
  std::memmove(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t tp, const void* from, size_t fp, size_t w, size_t h,
                                  cudaMemcpyKind, cudaStream_t s) {
  wait_stream(s);
  for (size_t r = 0; r < h; ++r) std::memmove((char*)to + r * tp, (const char*)from + r * fp, w);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  Lock l(guard);
  auto at = events.find(e);
  if (at != events.end())
    for (auto& o : at->second.ops)
      if (!o->done) return cudaErrorNotReady;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  Lock l(guard);
  auto& v = streams[s];
  prune(v);
  events[e] = {v, Clock::now()};
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  Lock l(guard);
  events.erase(e);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Lock l(guard);
  auto when = [](Event& e) {
    auto t = e.when;
    for (auto& o : e.ops)
      if (o->done && o->when > t) t = o->when;
    return t;
  };
  for (auto e : {a, b})
    for (auto& o : events[e].ops)
      if (!o->done) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(when(events[b]) - when(events[a])).count();
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  wait_stream(s);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  Lock l(guard);
  auto at = streams.find(s);
  if (at != streams.end())
    for (auto& o : at->second)
      if (!o->done) return cudaErrorNotReady;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  Lock l(guard);
  std::vector<Pending> v;
  for (auto& s : streams)
    for (auto& o : s.second) v.push_back(o);
  wait_all(l, v);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  wait_stream(s);
  std::memmove(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int v, size_t n, cudaStream_t s) {
  wait_stream(s);
  std::memset(to, v, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  wait_stream(nullptr);
  std::memmove(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {  // waits for the device, as the real one does
  static auto real = reinterpret_cast<cudaError_t (*)(void*)>(dlsym(RTLD_NEXT, "cudaFree"));
  if (p) cudaDeviceSynchronize();
  return real(p);
}
static void free_own(void* p) {
  if (p) reinterpret_cast<cudaError_t (*)(void*)>(dlsym(RTLD_NEXT, "cudaFree"))(p);
}
