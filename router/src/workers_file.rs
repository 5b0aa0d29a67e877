//! The file of workers: TOML, read again when it changes.
//!
//! Read by `pagoda route`. Invariant: a file that cannot be read changes nothing: what was known goes on, and the log says why.
//!
//! ```toml
//! [[worker]]                        # a Pagoda engine, by its internal listener
//! url = "http://10.0.0.1:8001"
//! name = "a"                        # the URL, where there is none
//!
//! [[worker]]                        # any other server of OpenAI's API
//! openai = "http://10.0.0.2:8000"
//! models = ["m"]                    # what it says itself, where there is none
//! api_key_file = "/run/secrets/key"
//! ```

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hyper::header::HeaderValue;
use serde::Deserialize;

use crate::worker::{Kind, WorkerConfig};

/// How often it is looked at.
const INTERVAL: Duration = Duration::from_millis(500);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    worker: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Option<String>,
    url: Option<String>,
    openai: Option<String>,
    #[serde(default)]
    models: Vec<String>,
    api_key_file: Option<PathBuf>,
}

/// Reads a file of workers; `cluster_token` opens the engines among them.
///
/// # Errors
/// What is wrong with it, and where.
pub fn read(path: &Path, cluster_token: Option<&str>) -> Result<Vec<WorkerConfig>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text, cluster_token).map_err(|error| format!("{}: {error}", path.display()))
}

fn parse(text: &str, cluster_token: Option<&str>) -> Result<Vec<WorkerConfig>, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut names = HashSet::new();
    let mut workers = Vec::with_capacity(file.worker.len());
    for (number, entry) in (1..).zip(file.worker) {
        let worker = worker(entry, cluster_token).map_err(|error| format!("worker {number}: {error}"))?;
        if !names.insert(worker.name.clone()) {
            return Err(format!("worker {number}: there is another of the name {}", worker.name));
        }
        workers.push(worker);
    }
    Ok(workers)
}

fn worker(entry: Entry, cluster_token: Option<&str>) -> Result<WorkerConfig, String> {
    let (kind, url) = match (entry.url, entry.openai) {
        (Some(url), None) => (Kind::Pagoda, url),
        (None, Some(url)) => (Kind::OpenAi, url),
        _ => return Err("has either `url` (a Pagoda engine's internal listener) or `openai`".into()),
    };
    let address = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
    let address = address.filter(|address| !address.is_empty() && !address.contains(['/', '?', '#', '@']));
    let address = address.ok_or_else(|| format!("`{url}` should be like http://HOST:PORT"))?;
    if !address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        return Err(format!("`{url}` has no port"));
    }
    let key = match (&kind, entry.api_key_file) {
        (Kind::Pagoda, Some(_)) => {
            return Err("`api_key_file` is for `openai`; an engine wants the cluster's token".into());
        }
        (Kind::Pagoda, None) => cluster_token.map(str::to_owned),
        (Kind::OpenAi, None) => None,
        (Kind::OpenAi, Some(path)) => {
            let key = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            Some(key.trim().to_owned())
        }
    };
    let bearer = |key: String| {
        let mut value = HeaderValue::try_from(format!("Bearer {key}")).map_err(|error| format!("its key: {error}"))?;
        value.set_sensitive(true);
        Ok::<_, String>(value)
    };
    Ok(WorkerConfig {
        name: entry.name.unwrap_or_else(|| url.clone()),
        kind,
        address: address.to_owned(),
        models: entry.models,
        authorization: key.map(bearer).transpose()?,
    })
}

/// Waits until the file is another than it was `before`; when it is that.
pub async fn changed(path: &Path, before: Option<SystemTime>) -> Option<SystemTime> {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let now = modified(path);
        if now != before {
            return now;
        }
    }
}

/// When the file was changed last.
pub fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_and_other_servers_are_read() {
        let text =
            "[[worker]]\nurl = \"http://a:1/\"\n[[worker]]\nname = \"b\"\nopenai = \"http://b:2\"\nmodels = [\"m\"]";
        let workers = parse(text, Some("t")).unwrap();
        assert_eq!(workers.len(), 2);
        assert_eq!((workers[0].name.as_str(), workers[0].address.as_str()), ("http://a:1/", "a:1"));
        assert_eq!(workers[0].authorization.as_ref().unwrap(), "Bearer t");
        assert_eq!((&workers[1].kind, workers[1].models.as_slice()), (&Kind::OpenAi, &["m".to_owned()][..]));
        assert!(workers[1].authorization.is_none());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (text, words) in [
            ("[[worker]]\n", "worker 1: has either `url`"),
            ("[[worker]]\nurl = \"http://a:1\"\nopenai = \"http://b:1\"", "worker 1: has either"),
            ("[[worker]]\nurl = \"a:1\"", "`a:1` should be like http://HOST:PORT"),
            ("[[worker]]\nurl = \"http://a\"", "has no port"),
            ("[[worker]]\nurl = \"http://a:1\"\nports = 3", "unknown field `ports`"),
            ("[[worker]]\nurl = \"http://a:1\"\n[[worker]]\nurl = \"http://a:1\"", "worker 2: there is another"),
            ("[[worker]]\nurl = \"http://a:1\"\napi_key_file = \"x\"", "is for `openai`"),
        ] {
            let error = parse(text, None).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
