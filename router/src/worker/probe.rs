//! Looking after a server that is none of ours: its models and its metrics, in vLLM's names, once a second.
//!
//! A task a worker, started by the fleet. What it holds of prompts is estimated elsewhere.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, StatusCode};
use protocol::WorkerReport;
use protocol::report::{Capacity, Load, Rates, Role};
use serde_json::Value;

use super::Worker;
use crate::fleet::Shared;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// For one answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Of an answer.
const MAX_BYTES: usize = 4 << 20;

/// Looks after a worker until the task is ended.
pub async fn look(worker: Arc<Worker>, shared: Arc<Shared>) {
    loop {
        match models(&worker).await {
            Some(models) => {
                if !worker.told().connected {
                    tracing::info!(worker = %worker.name, ?models, "a worker is there");
                    // It may be another than before, with nothing in its cache.
                    shared.estimates.forget(worker.estimated);
                    worker.report(report(models.clone(), ""));
                }
                let metrics = get(&worker, "/metrics").await.unwrap_or_default();
                worker.report(report(models, &String::from_utf8_lossy(&metrics)));
            }
            None => worker.lost(),
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The names that it serves, by its own word, unless the configuration says them.
async fn models(worker: &Worker) -> Option<Vec<String>> {
    let list: Value = serde_json::from_slice(&get(worker, "/v1/models").await?).ok()?;
    if !worker.config.models.is_empty() {
        return Some(worker.config.models.clone());
    }
    let names = list["data"].as_array()?.iter().filter_map(|model| model["id"].as_str().map(str::to_owned));
    Some(names.collect())
}

async fn get(worker: &Worker, path: &str) -> Option<Bytes> {
    let mut request = Request::get(path).header(HOST, worker.upstream.address());
    if let Some(authorization) = &worker.config.authorization {
        request = request.header(AUTHORIZATION, authorization);
    }
    let request = request.body(Full::default()).ok()?;
    let work = async {
        let (response, connection) = worker.upstream.send(request).await.ok()?.into_parts();
        if response.status() != StatusCode::OK {
            return None;
        }
        let body = Limited::new(response.into_body(), MAX_BYTES).collect().await.ok()?;
        connection.give_back();
        Some(body.to_bytes())
    };
    tokio::time::timeout(ANSWER_TIMEOUT, work).await.ok()?
}

/// A report made of metrics.
fn report(models: Vec<String>, metrics: &str) -> WorkerReport {
    let sum = |names: &[&str]| {
        names.iter().find_map(|name| {
            let is_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
            let values: Vec<f64> =
                metrics.lines().filter(is_it).filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>())
        })
    };
    // Blocks in thousandths: only the part in use is told.
    const BLOCKS: f64 = 1000.0;
    let used = sum(&["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]);
    WorkerReport {
        wire: WorkerReport::WIRE,
        models,
        fingerprint: String::new(),
        device: "openai".into(),
        role: Role::Both,
        epoch: 0,
        ready: true,
        load: Load {
            num_running: sum(&["vllm:num_requests_running"]).unwrap_or(0.0) as usize,
            num_waiting: sum(&["vllm:num_requests_waiting"]).unwrap_or(0.0) as usize,
            num_used_blocks: (used.unwrap_or(0.0) * BLOCKS) as usize,
            ..Load::default()
        },
        capacity: Capacity { num_blocks: BLOCKS as usize, ..Capacity::default() },
        rates: Rates::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllms_metrics_are_read_with_and_without_labels() {
        let text = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 2.0\nvllm:num_requests_waiting 4\n\
            vllm:num_requests_waiting_by_reason{reason=\"x\"} 9\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n";
        let report = report(vec!["m".into()], text);
        let load = report.load;
        assert_eq!((load.num_running, load.num_waiting, load.num_used_blocks), (5, 4, 250));
        assert_eq!(super::report(Vec::new(), "").load, Load::default());
    }
}
