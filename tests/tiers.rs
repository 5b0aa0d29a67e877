//! KV blocks that leave the device and come back: the same tokens from every tier, after a restart and on a replacement; and
//! what happens when blocks are damaged.

mod support;

use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use support::cache_service::CacheService;
use support::server::{PATIENCE, Server};
use support::tiny_model::Tiny;

/// A pool of 24 blocks of the tiny model: one prompt at a time.
const SMALL_POOL: &str = "96KiB";
/// 18 full blocks and some.
const PROMPT: usize = 300;

fn prompt(seed: usize) -> Vec<usize> {
    (0..PROMPT).map(|i| (i * 37 + seed * 101 + i * i % 7) % 250).collect()
}

/// An answer: its tokens with their log probabilities, and how much of the prompt was found.
#[derive(Debug, PartialEq)]
struct Answered {
    logprobs: Value,
    cached: u64,
}

fn ask(server: &Server, seed: usize) -> Answered {
    let body = json!({
        "prompt": prompt(seed), "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 2,
    });
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let mut answer = answer.json();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    Answered { logprobs: answer["choices"][0]["logprobs"].take(), cached }
}

/// The sum of a metric's samples whose line holds all of these texts.
fn metric(page: &str, name: &str, labels: &[&str]) -> f64 {
    let lines = page.lines().filter(|line| line.starts_with(name) && labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

fn count(server: &Server, name: &str, labels: &[&str]) -> f64 {
    metric(&server.get("/metrics").body, name, labels)
}

/// Waits until as many blocks were taken by a tier.
fn wait_stored(server: &Server, tier: &str, blocks: f64) {
    let labels = [&format!("tier=\"{tier}\"")[..], "outcome=\"stored\""];
    server.wait_for("the blocks in a tier", || count(server, "pagoda_kv_tier_puts_total", &labels) >= blocks);
}

fn devices() -> Vec<String> {
    std::iter::once("cpu".to_owned()).chain(support::software_vulkan()).collect()
}

struct Fixture {
    _model: tempfile::TempDir,
    path: PathBuf,
    directory: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let (model, path) = Tiny::default().write();
        Self { _model: model, path, directory: tempfile::tempdir().unwrap() }
    }

    fn start(&self, device: &str, pool: &str, flags: &[&str]) -> Server {
        Server::start(&self.path, &[&["--device", device, "--kv-cache-memory", pool], flags].concat())
    }

    fn disk(&self) -> String {
        self.directory.path().join("kv").to_str().unwrap().to_owned()
    }
}

/// Asks for a prompt whose blocks are no longer in the pool, as another took their place.
fn again_after_another(server: &Server, seed: usize, other: usize) -> Answered {
    ask(server, other);
    ask(server, seed)
}

#[test]
fn host_memory_gives_the_same_tokens_bit_for_bit() {
    let fixture = Fixture::new();
    for device in devices() {
        let cold = ask(&fixture.start(&device, "8MiB", &[]), 1);
        let server = fixture.start(&device, SMALL_POOL, &["--kv-host-bytes", "8MiB"]);
        assert_eq!(ask(&server, 1), cold, "{device}");
        ask(&server, 2);
        wait_stored(&server, "host", 14.0);
        let warm = ask(&server, 1);
        assert_eq!(warm.logprobs, cold.logprobs, "{device}");
        assert_eq!((cold.cached, warm.cached), (0, 288), "{device}: all full blocks but the last token's");
        assert!(count(&server, "pagoda_kv_loads_total", &["loaded"]) >= 14.0, "{device}");
        assert!(count(&server, "vllm:external_prefix_cache_hits_total", &[]) >= 14.0 * 16.0);
        // They are in memory already: nothing is put down twice.
        assert_eq!(again_after_another(&server, 1, 2).logprobs, cold.logprobs);
        assert_eq!(server.stat("num_used_blocks"), 0);
    }
}

#[test]
fn the_disk_gives_the_same_tokens_after_a_restart_and_after_a_kill() {
    let fixture = Fixture::new();
    for device in devices() {
        let disk = format!("{}-{}", fixture.disk(), device.replace(':', "-"));
        let flags = ["--kv-disk", &disk[..], "--kv-disk-bytes", "16MiB"];
        let mut server = fixture.start(&device, SMALL_POOL, &flags);
        let cold = ask(&server, 1);
        assert_eq!(cold.cached, 0, "{device}");
        server.terminate();
        assert!(server.wait().success());
        let mut server = fixture.start(&device, SMALL_POOL, &flags);
        let warm = ask(&server, 1);
        assert_eq!((&warm.logprobs, warm.cached), (&cold.logprobs, 288), "{device}");
        // Used twice, a prompt is written through without a drain: a killed engine loses nothing of it.
        let other = ask(&server, 7);
        ask(&server, 7);
        wait_stored(&server, "disk", 18.0);
        drop(std::process::Command::new("kill").args(["-KILL", &server.pid().to_string()]).status());
        server.wait();
        let server = fixture.start(&device, SMALL_POOL, &flags);
        let warm = ask(&server, 7);
        assert_eq!((&warm.logprobs, warm.cached), (&other.logprobs, 288), "{device}");
        assert_eq!(count(&server, "pagoda_kv_tier_lookups_total", &["damaged"]), 0.0);
    }
}

#[test]
fn blocks_of_bytes_are_kept_and_found_and_are_not_those_of_halves() {
    let (_model, path) = Tiny::wide().write();
    let fixture = Fixture { _model: tempfile::tempdir().unwrap(), path, directory: tempfile::tempdir().unwrap() };
    for device in devices() {
        let disk = format!("{}-{}", fixture.disk(), device.replace(':', "-"));
        let flags = ["--kv-disk", &disk[..], "--kv-disk-bytes", "16MiB"];
        let bytes = [&flags[..], &["--kv-cache-dtype", "q8_0"]].concat();
        let mut server = fixture.start(&device, "4MiB", &bytes);
        let cold = ask(&server, 1);
        server.terminate();
        assert!(server.wait().success());
        let mut server = fixture.start(&device, "4MiB", &bytes);
        let warm = ask(&server, 1);
        assert_eq!((&warm.logprobs, cold.cached, warm.cached), (&cold.logprobs, 0, 288), "{device}");
        server.terminate();
        assert!(server.wait().success());
        let server = fixture.start(&device, "4MiB", &flags);
        let halves = ask(&server, 1);
        assert_eq!(halves.cached, 0, "{device}");
        assert_ne!(halves.logprobs, cold.logprobs, "{device}");
    }
}

#[test]
fn a_replacement_starts_warm_from_the_tier_whatever_device_it_has() {
    let fixture = Fixture::new();
    let service = CacheService::start(fixture.directory.path(), &["--capacity", "16MiB"]);
    let url = service.url();
    for (index, device) in devices().into_iter().enumerate() {
        let seed = index + 1;
        let mut server = fixture.start(&device, "1MiB", &["--kv-tier", &url]);
        let cold = ask(&server, seed);
        // By the cluster's door this time.
        assert_eq!(drain(&server), 202);
        assert!(server.wait().success());
        for other in devices() {
            let replacement = fixture.start(&other, "1MiB", &["--kv-tier", &url, "--kv-compression", "zstd"]);
            let warm = ask(&replacement, seed);
            assert_eq!(warm.cached, 288, "from {device} to {other}");
            if other == device {
                assert_eq!(warm.logprobs, cold.logprobs, "{device}");
            } else {
                assert_same_off_near_ties(&warm.logprobs, &cold.logprobs);
            }
        }
    }
    let page = metrics_of(&service.address);
    assert!(metric(&page, "pagoda_kv_tier_lookups_total", &["hit"]) >= 36.0, "{page}");
    assert!(metric(&page, "pagoda_kv_tier_blocks", &["disk"]) >= 18.0, "{page}");
    service.stop();
}

#[test]
fn a_tier_is_reached_by_tls_with_the_certificate_that_is_trusted() {
    let fixture = Fixture::new();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let write = |name: &str, text: String| {
        let path = fixture.directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (certificate, key) =
        (write("cert.pem", signed.cert.pem()), write("key.pem", signed.signing_key.serialize_pem()));
    let kept = fixture.directory.path().join("kept");
    let service = CacheService::start(&kept, &["--ssl-certfile", &certificate, "--ssl-keyfile", &key]);
    let port = service.address.rsplit_once(':').unwrap().1;
    let url = format!("https://localhost:{port}");
    let flags = ["--kv-tier", &url[..], "--kv-tier-cafile", &certificate];
    let mut server = fixture.start("cpu", "1MiB", &flags);
    let cold = ask(&server, 1);
    server.terminate();
    assert!(server.wait().success());
    let warm = ask(&fixture.start("cpu", "1MiB", &flags), 1);
    assert_eq!((warm.cached, &warm.logprobs), (288, &cold.logprobs));
    // Another authority's word is not taken, and no request fails for it.
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let other = write("other.pem", other.cert.pem());
    let server = fixture.start("cpu", "1MiB", &["--kv-tier", &url, "--kv-tier-cafile", &other]);
    let computed = ask(&server, 1);
    assert_eq!((computed.cached, &computed.logprobs), (0, &cold.logprobs));
    server.wait_for("the log", || server.log.lock().unwrap().contains("the KV tier failed"));
}

fn drain(server: &Server) -> u16 {
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(&server.internal).unwrap();
    stream
        .write_all(b"POST /internal/v1/drain HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        .unwrap();
    support::server::read_answer(&mut stream).status
}

fn metrics_of(address: &str) -> String {
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    support::server::read_answer(&mut stream).body
}

/// Equal tokens up to the first that differs, where the two likeliest must be near each other.
fn assert_same_off_near_ties(a: &Value, b: &Value) {
    let tokens = |list: &Value| list["tokens"].as_array().unwrap().clone();
    let first = tokens(a).iter().zip(tokens(b)).position(|(a, b)| *a != b);
    let Some(first) = first else { return };
    let top = a["top_logprobs"][first].as_object().unwrap();
    let mut likely: Vec<f64> = top.values().map(|value| value.as_f64().unwrap()).collect();
    likely.sort_by(|a, b| b.total_cmp(a));
    assert!(likely[0] - likely[1] < 0.05, "token {first} differs and is no near-tie: {top:?}");
}

fn segments(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "kvseg")).collect()
}

#[test]
fn damaged_blocks_are_recomputed_and_counted() {
    let fixture = Fixture::new();
    let disk = fixture.disk();
    let flags = ["--kv-disk", &disk[..], "--kv-disk-bytes", "16MiB"];
    let mut server = fixture.start("cpu", "1MiB", &flags);
    let cold = ask(&server, 1);
    server.terminate();
    assert!(server.wait().success());
    // A flipped bit in every fourth page behind the headers: some blocks of the prompt stay whole.
    for path in segments(Path::new(&disk)) {
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        for at in (len / 16..len).step_by(16 << 10) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        }
    }
    let server = fixture.start("cpu", "1MiB", &flags);
    let warm = ask(&server, 1);
    assert_eq!(warm.logprobs, cold.logprobs);
    assert!(warm.cached < 288, "{}", warm.cached);
    assert!(count(&server, "pagoda_kv_tier_lookups_total", &["damaged"]) >= 1.0);
    assert!(count(&server, "pagoda_kv_loads_total", &["missing"]) >= 1.0);
}

#[test]
fn preempted_sequences_resume_from_memory_with_the_same_tokens() {
    let fixture = Fixture::new();
    let bodies: Vec<Value> = (0..4)
        .map(|seed| json!({ "prompt": prompt(seed)[..100], "max_tokens": 150, "temperature": 0, "ignore_eos": true }))
        .collect();
    let alone = fixture.start("cpu", "8MiB", &[]);
    let text = |server: &Server, body: &Value| -> Value {
        let answer = server.post("/v1/completions", body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0]["text"].take()
    };
    let expected: Vec<Value> = bodies.iter().map(|body| text(&alone, body)).collect();
    let server = fixture.start("cpu", SMALL_POOL, &["--kv-host-bytes", "8MiB"]);
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let streams: Vec<_> = bodies.iter().map(|body| scope.spawn(|| text(&server, body))).collect();
        streams.into_iter().map(|stream| stream.join().unwrap()).collect()
    });
    assert_eq!(answers, expected);
    assert!(server.stat("num_preemptions") > 0);
    assert!(count(&server, "pagoda_kv_stores_total", &["preempt", "stored"]) > 0.0, "{}", server.get("/metrics").body);
    assert!(count(&server, "pagoda_kv_loads_total", &["loaded"]) > 0.0);
}
