//! Logs and traces. Logs go to standard error, filtered by `PAGODA_LOG` (`info` where unset), as text or JSON; spans of
//! requests go to an OTLP collector where one is named. Neither holds text of prompts or answers.

use std::io::IsTerminal;

use anyhow::{Context, Result, bail};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::flags::LogFormat;

/// Sends what is left of the traces when dropped.
pub struct Telemetry(Option<SdkTracerProvider>);

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.as_ref().map(SdkTracerProvider::shutdown) {
            tracing::warn!(%error, "the last traces were not sent");
        }
    }
}

/// Installs the subscriber. `quiet` shows warnings only: for the terminal chat.
///
/// # Errors
/// When the filter or the collector's address cannot be read.
pub fn start(format: LogFormat, quiet: bool, otlp_endpoint: Option<&str>) -> Result<Telemetry> {
    let default =
        if quiet { "warn" } else { "info,wgpu_core=warn,wgpu_hal=warn,naga=warn,cubecl_wgpu=warn,cubecl_runtime=warn" };
    let filter = match std::env::var("PAGODA_LOG") {
        Ok(text) => EnvFilter::try_new(&text).with_context(|| format!("PAGODA_LOG={text}"))?,
        Err(_) => EnvFilter::new(default),
    };
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = logs.with_ansi(std::io::stderr().is_terminal());
    let logs = match format {
        LogFormat::Text => logs.with_filter(filter).boxed(),
        LogFormat::Json => logs.json().with_filter(filter).boxed(),
    };
    let provider = otlp_endpoint.map(provider).transpose().context("--otlp-traces-endpoint")?;
    let traces = provider.as_ref().map(|provider| {
        // Our own spans: an exporter that traced its own requests would never end.
        let ours = ["engine", "pagoda", "router"].map(|target| (target, LevelFilter::INFO));
        let ours = Targets::new().with_targets(ours);
        tracing_opentelemetry::layer().with_tracer(provider.tracer("pagoda")).with_filter(ours)
    });
    tracing_subscriber::registry().with(logs).with(traces).init();
    Ok(Telemetry(provider))
}

fn provider(endpoint: &str) -> Result<SdkTracerProvider> {
    if !endpoint.starts_with("http://") {
        bail!("{endpoint}: should be like http://HOST:4318/v1/traces (a collector near by; HTTPS is not spoken)");
    }
    opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
    let exporter = SpanExporter::builder().with_http().with_endpoint(endpoint).build()?;
    let resource = Resource::builder().with_attribute(KeyValue::new("service.name", "pagoda")).build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}
