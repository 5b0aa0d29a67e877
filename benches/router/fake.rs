//! Workers that do nothing but answer: what a router costs is then all there is. They tell what they hold as our engines do, and
//! have whatever else the peers ask of a worker.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::BytesMut;
use protocol::openai::RoutedRequest;
use protocol::{HeldChunk, WorkerEvent, WorkerReport};
use serde_json::{Value, json};
use tokio::sync::broadcast;

/// What one has seen.
#[derive(Default)]
struct Seen {
    groups: HashSet<String>,
    hits: usize,
    requests: usize,
    held: HashSet<u64>,
    sequence: u64,
}

struct Fake {
    seen: Mutex<Seen>,
    changes: broadcast::Sender<Bytes>,
}

/// Some of them, each on a port.
pub struct Fakes {
    pub ports: Vec<u16>,
    fakes: Vec<Arc<Fake>>,
    _runtime: tokio::runtime::Runtime,
}

fn report() -> Box<WorkerReport> {
    let json = json!({
        "version": 1, "readable_by": 1, "models": ["m"], "epoch": 1, "ready": true, "device": "fake",
        "capacity": { "num_blocks": 100_000, "block_size": 16, "max_num_seqs": 256, "max_model_len": 131_072 },
        "rates": { "prefill_tokens_per_s": 10_000.0, "decode_step_s": 0.02, "bytes_per_token": 4.0 },
    });
    Box::new(WorkerReport::parse(json.to_string().as_bytes()).unwrap())
}

async fn answer(State(fake): State<Arc<Fake>>, body: Bytes) -> Json<Value> {
    {
        let request = RoutedRequest::parse(&body, true).unwrap();
        let chain = request.chain("m", &request.cache_salt);
        let text = String::from_utf8_lossy(&body);
        let group = text.split("group-").nth(1).and_then(|rest| rest.split(' ').next()).map(str::to_owned);
        let mut seen = fake.seen.lock().unwrap();
        seen.requests += 1;
        if let Some(group) = group {
            seen.hits += usize::from(!seen.groups.insert(group));
        }
        let new = |(chunk, number): (&protocol::prompt_chain::Chunk, u32)| HeldChunk {
            hash: chunk.hash,
            num_tokens: number * 64,
            tier: 0,
        };
        let stored: Vec<HeldChunk> =
            chain.chunks().iter().zip(1..).map(new).filter(|chunk| seen.held.insert(chunk.hash)).collect();
        if !stored.is_empty() {
            seen.sequence += 1;
            let mut record = BytesMut::new();
            WorkerEvent::Change { sequence: seen.sequence, removed: Vec::new(), stored }.encode(&mut record);
            drop(fake.changes.send(record.freeze()));
        }
    }
    Json(json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": "ok" }, "finish_reason": "stop" }],
        "usage": { "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2 },
    }))
}

async fn events(State(fake): State<Arc<Fake>>) -> Body {
    let mut first = BytesMut::new();
    let changes = {
        let seen = fake.seen.lock().unwrap();
        WorkerEvent::Hello { epoch: 1, sequence: seen.sequence, report: report() }.encode(&mut first);
        let held = |&hash: &u64| HeldChunk { hash, num_tokens: 64, tier: 0 };
        let held: Vec<HeldChunk> = seen.held.iter().map(held).collect();
        held.chunks(30_000).for_each(|part| WorkerEvent::Snapshot(part.to_vec()).encode(&mut first));
        WorkerEvent::SnapshotEnd.encode(&mut first);
        fake.changes.subscribe()
    };
    let stream = futures_util::stream::unfold((Some(first.freeze()), changes), |(first, mut changes)| async move {
        if let Some(first) = first {
            return Some((Ok::<_, std::convert::Infallible>(first), (None, changes)));
        }
        let next = tokio::time::timeout(Duration::from_secs(1), changes.recv()).await;
        let piece = match next {
            Ok(change) => change.ok()?,
            Err(_) => {
                let mut record = BytesMut::new();
                WorkerEvent::Report(report()).encode(&mut record);
                record.freeze()
            }
        };
        Some((Ok(piece), (None, changes)))
    });
    Body::from_stream(stream)
}

impl Fakes {
    pub fn start(count: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (mut ports, mut fakes) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let fake = Arc::new(Fake { seen: Mutex::default(), changes: broadcast::Sender::new(1 << 14) });
            let models = || async { Json(json!({ "object": "list", "data": [{ "id": "m", "object": "model" }] })) };
            let info =
                || async { Json(json!({ "model_path": "m", "is_generation": true, "max_total_num_tokens": 100_000 })) };
            let routes = Router::new()
                .route("/v1/chat/completions", post(answer))
                .route("/internal/v1/chat/completions", post(answer))
                .route("/internal/v1/events", get(events))
                .route("/v1/models", get(models))
                .route("/health", get(|| async { "ok" }))
                .route("/get_model_info", get(info))
                .route("/get_server_info", get(info))
                .route("/server_info", get(info))
                .route("/model_info", get(info))
                .with_state(Arc::clone(&fake));
            let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
            ports.push(listener.local_addr().unwrap().port());
            fakes.push(fake);
            runtime.spawn(async move {
                axum::serve(listener, routes.layer(axum::extract::DefaultBodyLimit::disable())).await
            });
        }
        Self { ports, fakes, _runtime: runtime }
    }

    /// Requests of groups that found their worker again, and requests a worker.
    pub fn placement(&self) -> (usize, Vec<usize>) {
        let hits = self.fakes.iter().map(|fake| fake.seen.lock().unwrap().hits).sum();
        (hits, self.fakes.iter().map(|fake| fake.seen.lock().unwrap().requests).collect())
    }
}
