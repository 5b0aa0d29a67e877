//! A span a request, of all its tries: the child of the client's, the parent of the workers'. No text of prompt or answer is in it.
//!
//! Begun by the server where spans are exported; told by dispatch when the request is over.

use axum::http::HeaderMap;
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use tracing::field::Empty;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::asked::Asked;

/// Gives a request its span, and its workers that span as their parent.
pub(crate) fn begin(asked: &mut Asked, headers: &HeaderMap) {
    let path = asked.endpoint.path();
    let span = tracing::info_span!(
        "route",
        otel.name = format!("POST {path}"),
        otel.kind = "server",
        path,
        request_id = asked.request_id.to_str().unwrap_or_default(),
        reason = Empty,
        worker = Empty,
        tries = Empty,
        how = Empty,
    );
    let mut injected = HeaderMap::new();
    opentelemetry::global::get_text_map_propagator(|propagator| {
        // Where no traces are exported there is nothing to join.
        drop(span.set_parent(propagator.extract(&HeaderExtractor(headers))));
        propagator.inject_context(&span.context(), &mut HeaderInjector(&mut injected));
    });
    asked.headers = injected.into_iter().filter_map(|(name, value)| Some((name?, value))).collect();
    asked.span = span;
}
