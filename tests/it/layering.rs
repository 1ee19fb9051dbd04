//! Which module may know which. A single crate has no layers that a compiler checks, so this table is the check and the
//! documentation in one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// A module, and the modules that it may name. What is not here knows no other module.
const ALLOWED: &[(&str, &[&str])] = &[
    // The outside: commands and the process.
    ("cli", &["config", "demo", "key_file", "keys", "logging", "process"]),
    ("demo", &["config", "dialect", "key_file", "process"]),
    (
        "process",
        &[
            "admin", "config", "cut", "limit", "metrics", "policy", "proxy", "reload", "server", "tls",
            "upstream",
        ],
    ),
    ("reload", &["config", "policy", "proxy", "tls"]),
    ("server", &["config", "cut", "metrics", "proxy", "tunnel"]),
    ("admin", &["limit", "metrics", "server", "upstream"]),
    ("logging", &["config"]),
    ("key_file", &["atomic_file", "keys"]),
    // The hub, and what it hands from stage to stage.
    (
        "proxy",
        &[
            "answer",
            "auth",
            "body",
            "config",
            "cors",
            "cut",
            "error",
            "exchange",
            "forward",
            "headers",
            "hygiene",
            "keys",
            "limit",
            "media",
            "metrics",
            "model",
            "policy",
            "route",
            "tunnel",
            "upload",
            "upload_session",
            "upstream",
        ],
    ),
    (
        "answer",
        &[
            "body",
            "dialect",
            "error",
            "event_body",
            "events",
            "exchange",
            "headers",
            "meter",
            "policy",
            "probe",
            "tunnel",
            "upstream",
        ],
    ),
    (
        "error",
        &["auth", "cors", "dialect", "headers", "hygiene", "limit", "route", "size", "upload", "upstream"],
    ),
    (
        "exchange",
        &["auth", "cut", "dialect", "error", "headers", "limit", "metrics", "policy", "route", "upstream"],
    ),
    (
        "policy",
        &[
            "auth",
            "config",
            "cors",
            "headers",
            "keys",
            "limit",
            "pattern",
            "probe",
            "route",
            "tls",
            "uncounted",
            "upstream",
        ],
    ),
    // The stages. `auth` and `keys` know the credential, so `forward` asks them which values must not leave.
    ("auth", &["headers", "keys", "upload_session"]),
    ("upload_session", &["headers", "keys"]),
    ("route", &["media", "path", "pattern", "upstream"]),
    ("model", &["media"]),
    ("forward", &["auth", "headers", "keys", "route", "upstream"]),
    ("cors", &["headers", "pattern"]),
    ("hygiene", &["headers"]),
    ("uncounted", &["pattern"]),
    ("headers", &["limit", "pattern"]),
    ("limit", &["keys"]),
    ("upstream", &["config", "dialect", "headers", "metrics", "path", "tls", "upload"]),
    ("events", &["dialect"]),
    ("event_body", &["cut", "dialect", "error", "events", "upstream"]),
    ("body", &["event_body", "meter", "upstream"]),
    ("meter", &["exchange", "upstream"]),
    ("tunnel", &["exchange", "upstream"]),
    // The configuration is made of the leaves' own types.
    (
        "config",
        &["cors", "dialect", "headers", "keys", "limit", "media", "path", "pattern", "size", "uncounted"],
    ),
    ("tls", &["atomic_file", "config"]),
];

/// Crates that only these files may name.
const CONFINED: &[(&str, &[&str])] = &[
    ("redis", &["limit/redis/"]),
    ("rustls", &["tls/", "reload.rs", "server/", "upstream/connect.rs", "limit/redis/"]),
    ("h2", &["upstream/http2.rs"]),
    ("clap", &["cli.rs"]),
    ("rcgen", &["tls/"]),
    ("toml_edit", &["key_file.rs"]),
    ("prometheus_client", &["metrics.rs"]),
];

/// The code of every source file, without its tests and its comments, by its path in `src`.
fn sources() -> BTreeMap<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    let code = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap().to_owned();
        let lines: Vec<_> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        (path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned(), lines.join("\n"))
    };
    let sources: BTreeMap<_, _> = files.iter().map(code).collect();
    assert!(sources.len() > 20, "the sources were found");
    sources
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn module_of(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

/// The modules that `crate::name` and `crate::{name, name::…}` stand for.
fn named(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            None => names.extend(first_word(rest)),
            Some(list) => {
                let mut depth = 0;
                let mut item = String::new();
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => names.extend(first_word(&std::mem::take(&mut item))),
                        c if depth == 0 => item.push(c),
                        _ => {}
                    }
                }
                names.extend(first_word(&item));
            }
        }
    }
    names
}

fn first_word(text: &str) -> Option<String> {
    let word: String = text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!word.is_empty()).then_some(word)
}

#[test]
fn imports_point_from_the_hub_to_the_leaves() {
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let mut used = BTreeSet::new();
    let mut forbidden = Vec::new();
    for (file, code) in sources() {
        let module = module_of(&file).to_owned();
        for name in named(&code).into_iter().filter(|name| *name != module) {
            if !allowed.get(&*module).is_some_and(|names| names.contains(&&*name)) {
                forbidden.push(format!("{file} may not name crate::{name}"));
            }
            used.insert((module.clone(), name));
        }
    }
    assert!(forbidden.is_empty(), "{forbidden:#?}");
    let unused: Vec<_> = ALLOWED
        .iter()
        .flat_map(|(module, names)| names.iter().map(move |name| ((*module).to_owned(), (*name).to_owned())))
        .filter(|edge| !used.contains(edge))
        .collect();
    assert!(unused.is_empty(), "the table allows what nobody needs: {unused:?}");
}

#[test]
fn some_crates_are_known_to_few_files() {
    let mut forbidden = Vec::new();
    for (file, code) in sources() {
        for (name, homes) in CONFINED {
            if names_crate(&code, name) && !homes.iter().any(|home| file.starts_with(home)) {
                forbidden.push(format!("{file} may not name {name}"));
            }
        }
    }
    assert!(forbidden.is_empty(), "{forbidden:#?}");
}

/// Whether a crate is imported or used by its full path. A module of ours can have the same name, but never at the
/// beginning of a path.
fn names_crate(code: &str, name: &str) -> bool {
    let path = format!("{name}::");
    let starts_a_path = |(at, _): (usize, &str)| {
        let before = code[..at].trim_end();
        let is_inside_another = before.ends_with("::") || before.ends_with('{') || before.ends_with(',');
        !is_inside_another && !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
    };
    code.match_indices(&path).any(starts_a_path)
}

#[test]
fn the_parser_sees_every_form_of_import() {
    let code = "use crate::{a, b::{c, d}, e::f};\nuse crate::g;\nfn h() { crate::i::j(); }";
    let expected: BTreeSet<_> = ["a", "b", "e", "g", "i"].map(str::to_owned).into();
    assert_eq!(named(code), expected);
}
