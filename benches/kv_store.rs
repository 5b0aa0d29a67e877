//! The KV store alone: `cargo bench --bench kv_store -- [store|wire|recovery|hits]` (all without an argument).
//!
//! `store`: blocks of 360 KiB to and from the disk, beside `memcpy`, plain writes and `dd` in the same run. `wire`: `/kv/v1`
//! over loopback with four clients, beside Redis and bare TCP. `recovery`: a million slots. `hits`: the eviction on a
//! production trace, beside LRU. Cold numbers need root, to drop the system's page cache.

mod measure;
#[path = "../tests/support/mod.rs"]
mod support;
mod traces;

use bytes::Bytes;
use cache_tier::eviction::{Eviction, MAX_USES, Queue, Residency, Residents};
use cache_tier::ghost::Ghost;
use cache_tier::remote::{RemoteLimits, RemoteStore, TcpConnector};
use cache_tier::{DiskConfig, DiskStore, Store};
use futures_util::{StreamExt, stream};
use measure::{cpu_seconds, median};
use protocol::{BlockHash, BlockIdentity, BlockKey, KvFrame, ModelFingerprint, NumericsClass, PutReason, Salt};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::cache_service::CacheService;

/// A block of SmolLM2: 30 layers, 3 heads of 64, 16 tokens, K and V in f16.
const BLOCK: usize = 360 << 10;
const ROUNDS: usize = 5;
const CLIENTS: usize = 4;

fn identity(number: u32) -> BlockIdentity {
    let parent = BlockHash::root(&Salt::default());
    let token_ids: Box<[u32]> = (0..16).map(|i| number.wrapping_add(i)).collect();
    let key = BlockKey { model: ModelFingerprint::from_bytes([7; 32]), block: parent.child(&token_ids) };
    BlockIdentity { key, parent, token_ids }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(next).take(len).collect()
}

fn frames(count: u32, len: usize) -> Vec<KvFrame> {
    let payload = Bytes::from(noise(len, 9));
    (0..count).map(|number| KvFrame::new(identity(number), NumericsClass::new("bench"), payload.clone())).collect()
}

fn open(directory: &Path, capacity_bytes: u64) -> DiskStore {
    DiskStore::open(DiskConfig { directory: directory.to_owned(), capacity_bytes }).unwrap()
}

/// Whether the system's page cache could be dropped.
fn drop_caches() -> bool {
    Command::new("sync").status().unwrap();
    std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

fn gb_per_s(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

/// Beside the build: a real disk, where `/tmp` may be memory.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

const COUNT: u32 = 1500;

/// Reads all blocks as the engine does: 16 at once, the next 16 meanwhile.
async fn read_all(store: &DiskStore, keys: &[BlockKey], copy: bool) -> usize {
    let reads = stream::iter(keys.chunks(16)).map(|keys| store.read(keys, copy)).buffered(2);
    reads.fold(0, |bytes, found| async move { bytes + found.into_iter().map(len_of).sum::<usize>() }).await
}

fn len_of(lookup: protocol::Lookup<KvFrame>) -> usize {
    lookup.hit().expect("a stored block").payload.len()
}

/// Seconds to write the same bytes to a file that was allocated before, and to bring them to the medium.
fn plain_write(directory: &Path, payload: &[u8]) -> f64 {
    let path = directory.join("plain");
    let file = std::fs::File::options().create(true).truncate(true).write(true).open(&path).unwrap();
    let started = Instant::now();
    for index in 0..u64::from(COUNT) {
        file.write_all_at(payload, index * payload.len() as u64).unwrap();
    }
    file.sync_data().unwrap();
    let seconds = started.elapsed().as_secs_f64();
    std::fs::remove_file(path).unwrap();
    seconds
}

fn memcpy(bytes: usize) -> f64 {
    let source = noise(bytes.min(512 << 20), 3);
    let started = Instant::now();
    for chunk in source.chunks(BLOCK) {
        // A new allocation each, as every block that is read gets.
        std::hint::black_box(chunk.to_vec());
    }
    gb_per_s(source.len(), started.elapsed().as_secs_f64())
}

fn store(runtime: &tokio::runtime::Runtime) {
    let frames = frames(COUNT, BLOCK);
    let keys: Vec<BlockKey> = frames.iter().map(|frame| frame.header.identity.key).collect();
    let bytes = COUNT as usize * BLOCK;
    let (mut ours, mut plain, mut reads, mut maps, mut copies) = (vec![], vec![], vec![], vec![], vec![]);
    let (mut cold, mut dd) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let directory = scratch();
        let store = open(directory.path(), 1 << 30);
        let started = Instant::now();
        runtime.block_on(async {
            for batch in frames.chunks(32) {
                store.put(batch.to_vec(), PutReason::Drain).await;
            }
            store.sync().await;
        });
        ours.push(gb_per_s(bytes, started.elapsed().as_secs_f64()));
        plain.push(gb_per_s(bytes, plain_write(directory.path(), &frames[0].payload)));
        for (copy, list) in [(true, &mut reads), (false, &mut maps)] {
            let started = Instant::now();
            assert_eq!(runtime.block_on(read_all(&store, &keys, copy)), bytes);
            list.push(gb_per_s(bytes, started.elapsed().as_secs_f64()));
        }
        copies.push(memcpy(bytes));
        drop(store);
        if !drop_caches() {
            continue;
        }
        let store = open(directory.path(), 1 << 30);
        let started = Instant::now();
        assert_eq!(runtime.block_on(read_all(&store, &keys, true)), bytes);
        cold.push(gb_per_s(bytes, started.elapsed().as_secs_f64()));
        drop(store);
        drop_caches();
        let started = Instant::now();
        let script = format!(
            "for f in {}/*.kvseg; do dd if=$f of=/dev/null bs=1M status=none; done",
            directory.path().display()
        );
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        dd.push(gb_per_s(bytes, started.elapsed().as_secs_f64()));
    }
    let (ours, plain, reads, maps, copies) = (median(ours), median(plain), median(reads), median(maps), median(copies));
    println!("store: {COUNT} blocks of 360 KiB, GB/s, medians of {ROUNDS}");
    println!("  write and sync  {ours:.2}  plain file {plain:.2}  ratio {:.2}", ours / plain);
    println!("  read, checked   {reads:.2}  memcpy {copies:.2}  ratio {:.2}", reads / copies);
    println!("  read, mapped    {maps:.2}");
    if !cold.is_empty() {
        let (cold, dd) = (median(cold), median(dd));
        println!("  read cold       {cold:.2}  dd {dd:.2}  ratio {:.2}", cold / dd);
    }
}

/// GB/s and CPU seconds a GB, both ends, of some work that moves so many bytes.
fn moved(server: u32, bytes: usize, work: impl FnOnce()) -> (f64, f64) {
    let own = std::process::id();
    let cpu = || cpu_seconds(own) + if server == own { 0.0 } else { cpu_seconds(server) };
    let (before, started) = (cpu(), Instant::now());
    work();
    let seconds = started.elapsed().as_secs_f64();
    (gb_per_s(bytes, seconds), (cpu() - before) / (bytes as f64 / 1e9))
}

const WIRE_BLOCKS: u32 = 256;
/// Blocks that one request, or one pipeline, asks for.
const AT_ONCE: usize = 16;
/// How often each client reads all blocks.
const PASSES: usize = 6;

fn wire_bytes() -> usize {
    CLIENTS * PASSES * WIRE_BLOCKS as usize * BLOCK
}

fn ours(runtime: &tokio::runtime::Runtime, service: &CacheService, keys: &[BlockKey]) -> (f64, f64) {
    moved(service.child.id(), wire_bytes(), || {
        let clients = (0..CLIENTS).map(|_| {
            let (address, keys) = (service.address.clone(), keys.to_vec());
            runtime.spawn(async move {
                let store = RemoteStore::new(Arc::new(TcpConnector(address)), None, RemoteLimits::default());
                for _ in 0..PASSES {
                    for keys in keys.chunks(AT_ONCE) {
                        // Checked by the client.
                        let found = store.get(keys).await.into_iter().filter_map(protocol::Lookup::hit).count();
                        assert_eq!(found, keys.len());
                    }
                }
            })
        });
        let clients: Vec<_> = clients.collect();
        clients.into_iter().for_each(|client| runtime.block_on(client).unwrap());
    })
}

fn redis() -> (Child, u16) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"])
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server (Debian: redis-server)");
    let started = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(started.elapsed() < Duration::from_secs(20), "redis does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    (server, port)
}

fn of_redis(server: &Child, port: u16) -> (f64, f64) {
    let command = |number: usize| format!("*2\r\n$3\r\nGET\r\n$7\r\nkey{number:04}\r\n");
    moved(server.id(), wire_bytes(), || {
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                    let mut answer = vec![0; AT_ONCE * (BLOCK + format!("${BLOCK}\r\n").len() + 2)];
                    for _ in 0..PASSES {
                        for first in (0..WIRE_BLOCKS as usize).step_by(AT_ONCE) {
                            let pipeline: String = (first..first + AT_ONCE).map(command).collect();
                            stream.write_all(pipeline.as_bytes()).unwrap();
                            stream.read_exact(&mut answer).unwrap();
                        }
                    }
                });
            }
        });
    })
}

/// The same blocks, from as much memory, with nothing around them.
fn bare_tcp(blocks: &[Vec<u8>]) -> (f64, f64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let each = PASSES * blocks.len();
    moved(std::process::id(), wire_bytes(), || {
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    let mut stream = TcpStream::connect(address).unwrap();
                    let mut buffer = vec![0; BLOCK];
                    (0..each).for_each(|_| stream.read_exact(&mut buffer).unwrap());
                });
                let (mut stream, _) = listener.accept().unwrap();
                let blocks = blocks.iter().cycle().take(each);
                scope.spawn(move || blocks.into_iter().for_each(|block| stream.write_all(block).unwrap()));
            }
        });
    })
}

fn wire(runtime: &tokio::runtime::Runtime) {
    let directory = scratch();
    let service = CacheService::start(directory.path(), &["--capacity", "1GiB"]);
    let frames = frames(WIRE_BLOCKS, BLOCK);
    let keys: Vec<BlockKey> = frames.iter().map(|frame| frame.header.identity.key).collect();
    let client = RemoteStore::new(Arc::new(TcpConnector(service.address.clone())), None, RemoteLimits::default());
    for batch in frames.chunks(AT_ONCE) {
        runtime.block_on(client.put(batch.to_vec(), PutReason::Drain));
    }
    let blocks: Vec<Vec<u8>> = (0..WIRE_BLOCKS).map(|number| noise(BLOCK, u64::from(number))).collect();
    let (mut redis_server, port) = redis();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for number in 0..WIRE_BLOCKS {
        stream.write_all(format!("*3\r\n$3\r\nSET\r\n$7\r\nkey{number:04}\r\n${BLOCK}\r\n").as_bytes()).unwrap();
        stream.write_all(&frames[0].payload).unwrap();
        stream.write_all(b"\r\n").unwrap();
        let mut ok = [0; 5];
        stream.read_exact(&mut ok).unwrap();
    }
    let mut all: BTreeMap<&str, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let round = [
            ("pagoda", ours(runtime, &service, &keys)),
            ("redis", of_redis(&redis_server, port)),
            ("tcp", bare_tcp(&blocks)),
        ];
        for (name, (speed, cpu)) in round {
            let lists = all.entry(name).or_default();
            lists.0.push(speed);
            lists.1.push(cpu);
        }
    }
    redis_server.kill().unwrap();
    redis_server.wait().unwrap();
    let numbers = |name: &str| all.get(name).map(|(speed, cpu)| (median(speed.clone()), median(cpu.clone()))).unwrap();
    let (ours, redis, tcp) = (numbers("pagoda"), numbers("redis"), numbers("tcp"));
    println!("wire: values of 360 KiB, {CLIENTS} clients, {AT_ONCE} a request, loopback; medians of {ROUNDS}");
    println!("  GB/s          pagoda {:.2}  redis {:.2}  bare TCP {:.2}", ours.0, redis.0, tcp.0);
    println!("  CPU s a GB    pagoda {:.2}  redis {:.2}  bare TCP {:.2}", ours.1, redis.1, tcp.1);
    println!("  ratios        to redis {:.2}, to bare TCP {:.2}", ours.0 / redis.0, ours.0 / tcp.0);
}

fn recovery(runtime: &tokio::runtime::Runtime) {
    const SLOTS: u32 = 1_000_000;
    let directory = scratch();
    // Slots of a simulated device's blocks: headers are of the same size, and only headers are read.
    let store = open(directory.path(), 1 << 30);
    let payload = Bytes::from(vec![7; 64]);
    for first in (0..SLOTS).step_by(1000) {
        let number = |number| KvFrame::new(identity(number * 16), NumericsClass::new("bench"), payload.clone());
        runtime.block_on(store.put((first..first + 1000).map(number).collect(), PutReason::Drain));
    }
    assert_eq!(store.stats()[0].num_blocks, u64::from(SLOTS));
    drop(store);
    let timed = || {
        let started = Instant::now();
        let store = open(directory.path(), 1 << 30);
        assert_eq!(store.stats()[0].num_blocks, u64::from(SLOTS));
        (started.elapsed().as_secs_f64(), store.index_bytes() as f64 / f64::from(SLOTS))
    };
    let (warm, index) = timed();
    let cold = if drop_caches() { format!("{:.2} s", timed().0) } else { "not measured without root".into() };
    println!("recovery: {SLOTS} slots, warm {warm:.2} s, cold {cold}, index {index:.0} bytes a block");
}

/// A cache of names under some eviction.
trait Cache {
    fn has(&self, block: u64) -> bool;
    fn touch(&mut self, block: u64);
}

/// Ours: what the stores do, without bytes.
struct Ours {
    capacity: usize,
    uses: HashMap<u32, u8>,
    eviction: Eviction,
    ghost: Ghost,
}

struct Uses<'a>(&'a mut HashMap<u32, u8>);

impl Residents for Uses<'_> {
    fn residency(&self, id: u32) -> Residency {
        self.0.get(&id).map_or(Residency::Gone, |&uses| Residency::Uses(uses))
    }

    fn set_uses(&mut self, id: u32, uses: u8) {
        self.0.insert(id, uses);
    }
}

impl Cache for Ours {
    fn has(&self, block: u64) -> bool {
        self.uses.contains_key(&(block as u32))
    }

    fn touch(&mut self, block: u64) {
        let id = block as u32;
        if let Some(uses) = self.uses.get_mut(&id) {
            *uses = (*uses + 1).min(MAX_USES);
            return;
        }
        if self.uses.len() == self.capacity
            && let Some((victim, queue)) = self.eviction.victim(&mut Uses(&mut self.uses))
        {
            self.uses.remove(&victim);
            if queue == Queue::Small {
                self.ghost.note(u64::from(victim));
            }
        }
        self.uses.insert(id, 0);
        self.eviction.insert(id, self.ghost.take(block));
    }
}

/// The least recently used leaves.
struct Lru {
    capacity: usize,
    clock: u64,
    by_block: HashMap<u64, u64>,
    by_time: BTreeMap<u64, u64>,
}

impl Cache for Lru {
    fn has(&self, block: u64) -> bool {
        self.by_block.contains_key(&block)
    }

    fn touch(&mut self, block: u64) {
        self.clock += 1;
        if let Some(before) = self.by_block.insert(block, self.clock) {
            self.by_time.remove(&before);
        } else if self.by_block.len() > self.capacity
            && let Some((_, oldest)) = self.by_time.pop_first()
        {
            self.by_block.remove(&oldest);
        }
        self.by_time.insert(self.clock, block);
    }
}

/// Part of all prompt blocks that lie in a prefix which the cache holds.
fn hit_rate(requests: &[traces::Traced], cache: &mut dyn Cache) -> f64 {
    let (mut hits, mut all) = (0, 0);
    for request in requests {
        hits += request.blocks.iter().take_while(|&&block| cache.has(block)).count();
        all += request.blocks.len();
        request.blocks.iter().for_each(|&block| cache.touch(block));
    }
    hits as f64 / all as f64
}

fn hits() {
    let requests = traces::conversation();
    let distinct = requests.iter().flat_map(|request| &request.blocks).collect::<HashSet<_>>().len();
    println!("hits: {} requests, {distinct} blocks; part of prompt blocks found", requests.len());
    for percent in [2, 5, 10] {
        let capacity = distinct * percent / 100;
        let ours = Ours { capacity, uses: HashMap::new(), eviction: Eviction::default(), ghost: Ghost::new(capacity) };
        let lru = Lru { capacity, clock: 0, by_block: HashMap::new(), by_time: BTreeMap::new() };
        let [ours, lru] =
            [&mut { ours } as &mut dyn Cache, &mut { lru }].map(|cache| hit_rate(&requests, cache) * 100.0);
        println!("  {percent:2} % of them: pagoda {ours:.2} %, LRU {lru:.2} %, ratio {:.2}", ours / lru);
    }
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    if is_wanted("hits") {
        hits();
    }
    if is_wanted("recovery") {
        recovery(&runtime);
    }
    if is_wanted("store") {
        store(&runtime);
    }
    if is_wanted("wire") {
        wire(&runtime);
    }
}
