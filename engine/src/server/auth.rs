//! Who calls: API keys, and the cluster's token on the internal listener.
//!
//! Keys are kept as BLAKE3 hashes, whose comparison takes the same time wherever they differ; all are compared every time.

use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::Server;
use super::error::ApiError;

/// Keys beyond this many share one label in metrics.
const MAX_LABELS: usize = 100;
/// Paths that supervisors and scrapers ask without a key.
const OPEN_PATHS: [&str; 3] = ["/health", "/ready", "/metrics"];

/// A key.
#[derive(Clone, Debug)]
struct Key {
    /// In metrics.
    label: Arc<str>,
    /// Whose it is: keys of one name are one tenant's.
    tenant: Arc<str>,
    hash: blake3::Hash,
}

/// The keys that open the API.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys {
    keys: Vec<Key>,
}

impl ApiKeys {
    /// Adds a key under its own name, by which metrics tell its use.
    ///
    /// # Errors
    /// When it is empty.
    pub fn add(&mut self, name: Option<&str>, key: &str) -> Result<(), String> {
        if key.is_empty() {
            return Err("an API key is empty".into());
        }
        let tenant: Arc<str> = name.map_or_else(|| format!("key-{}", self.keys.len() + 1).into(), Arc::from);
        let label = if self.keys.len() >= MAX_LABELS { "other".into() } else { Arc::clone(&tenant) };
        self.keys.push(Key { label, tenant, hash: blake3::hash(key.as_bytes()) });
        Ok(())
    }

    /// Adds the keys of a file: a line each, `KEY` or `NAME KEY`; empty lines and what follows a # say nothing.
    ///
    /// # Errors
    /// When it cannot be read or holds no key.
    pub fn add_file(&mut self, path: &Path) -> Result<(), String> {
        let fail = |reason: String| format!("{}: {reason}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let before = self.keys.len();
        for (number, line) in (1..).zip(text.lines()) {
            let words: Vec<&str> = line.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
            match words[..] {
                [] => {}
                [key] => self.add(None, key)?,
                [name, key] => self.add(Some(name), key)?,
                _ => return Err(fail(format!("line {number} has {} words, should be KEY or NAME KEY", words.len()))),
            }
        }
        if self.keys.len() == before {
            return Err(fail("holds no key".into()));
        }
        Ok(())
    }

    /// Whether no key is asked for.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The name by which metrics tell a request's key.
    fn name(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        self.key(headers).map(|key| Arc::clone(&key.label))
    }

    /// Whose key a request carries.
    pub fn tenant(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        self.key(headers).map(|key| Arc::clone(&key.tenant))
    }

    fn key(&self, headers: &HeaderMap) -> Option<&Key> {
        let given = blake3::hash(bearer(headers)?);
        self.keys.iter().fold(None, |found, key| if key.hash == given { Some(key) } else { found })
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// The caller of a request, put beside it for the handlers.
#[derive(Clone, Debug)]
pub(super) struct Caller(Arc<str>);

impl Caller {
    /// A router, which knows whose requests it brings.
    pub(super) fn router() -> Self {
        Self("router".into())
    }

    /// The key's name; empty where no keys are asked for.
    pub(super) fn name(&self) -> &str {
        &self.0
    }
}

/// Refuses a request without a key, where keys are asked for.
pub(super) async fn check_key(State(server): State<Arc<Server>>, mut request: Request<Body>, next: Next) -> Response {
    let keys = &server.config.api_keys;
    let is_open = keys.is_empty() || OPEN_PATHS.contains(&request.uri().path());
    let name = if is_open { Some(Arc::from("")) } else { keys.name(request.headers()) };
    let Some(name) = name else {
        let message = "this server wants an API key: Authorization: Bearer KEY";
        return ApiError::unauthorized(message).into_response();
    };
    request.extensions_mut().insert(Caller(name));
    next.run(request).await
}

/// Refuses what does not carry the cluster's token, where there is one.
pub(super) async fn check_cluster_token(
    State(token): State<Option<blake3::Hash>>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let given = bearer(request.headers()).map(blake3::hash);
    match (token, given) {
        (Some(token), Some(given)) if given == token => next.run(request).await,
        (None, _) => next.run(request).await,
        _ => ApiError::new(StatusCode::UNAUTHORIZED, "the cluster token is missing or wrong").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn a_key_is_known_by_its_name_and_nothing_else_opens() {
        let file = std::env::temp_dir().join(format!("pagoda-keys-{}", std::process::id()));
        std::fs::write(&file, "# comment\n\nsk-plain # a note\nteam-a sk-a\n").unwrap();
        let mut keys = ApiKeys::default();
        keys.add(None, "sk-flag").unwrap();
        keys.add_file(&file).unwrap();
        let name = |value: &str| keys.name(&headers(value)).map(|name| name.to_string());
        assert_eq!(name("Bearer sk-flag").as_deref(), Some("key-1"));
        assert_eq!(name("bearer sk-plain").as_deref(), Some("key-2"));
        assert_eq!(name("Bearer sk-a").as_deref(), Some("team-a"));
        for wrong in ["Bearer sk-", "Bearer ", "sk-a", "Basic sk-a", "Bearer team-a", "Bearer sk-a "] {
            assert_eq!(name(wrong), None, "{wrong}");
        }
        assert_eq!(keys.name(&HeaderMap::new()), None);
        std::fs::write(&file, "a b c\n").unwrap();
        assert!(keys.add_file(&file).unwrap_err().contains("line 1 has 3 words"));
        std::fs::write(&file, "#\n").unwrap();
        assert!(keys.add_file(&file).unwrap_err().contains("holds no key"));
        std::fs::remove_file(&file).unwrap();
    }
}
