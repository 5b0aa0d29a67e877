//! A span a request: joined to the caller's trace, named by its request id, with no text of prompt or answer in it.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Request, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry_http::HeaderExtractor;
use tracing::Instrument;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::answer;

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer ids of callers are not repeated in logs.
const MAX_ID_BYTES: usize = 256;

/// Runs a request in its span, and echoes the caller's request id or the one that it got here.
pub(super) async fn request_span(request: Request<Body>, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let given = request.headers().get(&REQUEST_ID).filter(|id| id.len() <= MAX_ID_BYTES).cloned();
    let id = given.or_else(|| HeaderValue::try_from(answer::new_id("req")).ok());
    let request_id = id.as_ref().and_then(|id| id.to_str().ok()).unwrap_or_default();
    let span = tracing::info_span!(
        "request",
        otel.name = format!("{method} {path}"),
        otel.kind = "server",
        %method,
        path,
        request_id,
        status = tracing::field::Empty,
        gen_ai.usage.prompt_tokens = tracing::field::Empty,
        gen_ai.usage.completion_tokens = tracing::field::Empty,
    );
    let parent = opentelemetry::global::get_text_map_propagator(|propagator| {
        propagator.extract(&HeaderExtractor(request.headers()))
    });
    // Where no traces are exported there is nothing to join.
    drop(span.set_parent(parent));
    let started = std::time::Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status();
    span.record("status", status.as_u16());
    let ms = started.elapsed().as_millis() as u64;
    span.in_scope(|| match status {
        status if status.is_server_error() && status != StatusCode::SERVICE_UNAVAILABLE => {
            tracing::warn!(status = status.as_u16(), ms, "answered");
        }
        status => tracing::debug!(status = status.as_u16(), ms, "answered"),
    });
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID.clone(), id);
    }
    response
}

/// Tells the span of the request its tokens.
pub(super) fn record_usage(span: &tracing::Span, prompt_tokens: usize, completion_tokens: usize) {
    span.record("gen_ai.usage.prompt_tokens", prompt_tokens);
    span.record("gen_ai.usage.completion_tokens", completion_tokens);
}
