// Command extender is kube-scheduler's side of extender/v1, made of the real Go
// types: it writes examples of every message, reads answers strictly, and calls
// the verbs of an extender while it measures their time.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kube-scheduler/extender/v1"
)

const usage = "usage: extender goldens FOLDER | extender check KIND <JSON | extender calls URL <JSON lines"

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal(usage)
	}
	run := map[string]func(string) error{"goldens": goldens, "check": check, "calls": calls}[os.Args[1]]
	if run == nil {
		log.Fatal(usage)
	}
	if err := run(os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

// pod asks for `cores` and `blocks` in an app container and, if `initial` is
// set, in an init container before it.
func pod(namespace, name string, cores, blocks int64, initial bool) *core.Pod {
	container := func(name string) core.Container {
		amounts := core.ResourceList{
			"tencent.com/vcuda-core":   *resource.NewQuantity(cores, resource.DecimalSI),
			"tencent.com/vcuda-memory": *resource.NewQuantity(blocks, resource.DecimalSI),
			core.ResourceCPU:           resource.MustParse("500m"),
		}
		return core.Container{Name: name, Image: "registry.invalid/work:1",
			Resources: core.ResourceRequirements{Limits: amounts, Requests: amounts}}
	}
	made := &core.Pod{
		ObjectMeta: meta.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name),
			Labels: map[string]string{"app": "work"}, Annotations: map[string]string{"gpumgr.io/policy": "spread"},
			CreationTimestamp: meta.Unix(1700000000, 0)},
		Spec:   core.PodSpec{Containers: []core.Container{container("main")}, SchedulerName: "gpumgr-scheduler"},
		Status: core.PodStatus{Phase: core.PodPending},
	}
	if initial {
		made.Spec.InitContainers = []core.Container{container("prepare")}
	}
	return made
}

func node(name string) core.Node {
	amounts := core.ResourceList{"tencent.com/vcuda-core": resource.MustParse("200"), "tencent.com/vcuda-memory": resource.MustParse("128")}
	return core.Node{
		ObjectMeta: meta.ObjectMeta{Name: name, UID: types.UID("uid-" + name), Annotations: map[string]string{"example.com/rack": "7"}},
		Status:     core.NodeStatus{Capacity: amounts, Allocatable: amounts},
	}
}

func goldens(folder string) error {
	work, names := pod("team", "work", 50, 8, true), []string{"a", "b"}
	list := &core.NodeList{Items: []core.Node{node("a"), node("b")}}
	victims := []*api.MetaPod{{UID: "uid-1"}, {UID: "uid-2"}}
	meta := map[string]*api.MetaVictims{"a": {Pods: victims, NumPDBViolations: 1}, "b": {}}
	whole := map[string]*api.Victims{"a": {Pods: []*core.Pod{pod("team", "old", 100, 0, false)}}}
	for name, value := range map[string]any{
		"args_names":           api.ExtenderArgs{Pod: work, NodeNames: &names},
		"args_no_names":        api.ExtenderArgs{Pod: work, NodeNames: &[]string{}},
		"args_nodes":           api.ExtenderArgs{Pod: work, Nodes: list},
		"args_nothing":         api.ExtenderArgs{},
		"filter_result_names":  api.ExtenderFilterResult{NodeNames: &names, FailedNodes: api.FailedNodesMap{"c": "no room"}},
		"filter_result_nodes":  api.ExtenderFilterResult{Nodes: list, FailedAndUnresolvableNodes: api.FailedNodesMap{"c": "no room"}},
		"filter_result_error":  api.ExtenderFilterResult{Error: "not ready"},
		"priorities":           api.HostPriorityList{{Host: "a", Score: 10}, {Host: "b"}},
		"binding_args":         api.ExtenderBindingArgs{PodName: "work", PodNamespace: "team", PodUID: "uid-work", Node: "a"},
		"binding_result":       api.ExtenderBindingResult{},
		"binding_result_error": api.ExtenderBindingResult{Error: "no room"},
		"preemption_args":      api.ExtenderPreemptionArgs{Pod: work, NodeNameToMetaVictims: meta},
		"preemption_args_pods": api.ExtenderPreemptionArgs{Pod: work, NodeNameToVictims: whole},
		"preemption_result":    api.ExtenderPreemptionResult{NodeNameToMetaVictims: meta},
	} {
		text, err := json.MarshalIndent(value, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(folder, name+".json"), append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// check reads one answer from standard input as the Go type of that name. A
// field that the type lacks is an error, which kube-scheduler would not see.
func check(kind string) error {
	value := map[string]any{
		"filter": &api.ExtenderFilterResult{}, "prioritize": &api.HostPriorityList{},
		"bind": &api.ExtenderBindingResult{}, "preempt": &api.ExtenderPreemptionResult{},
	}[kind]
	if value == nil {
		return fmt.Errorf("no answer is called %q", kind)
	}
	decoder := json.NewDecoder(os.Stdin)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(value)
}

// round is one line of standard input: `Pods` pods; each one goes through
// the verbs one after another. The offered names are Prefix00000 and so on,
// from the `First`.
type round struct {
	Verbs         []string
	Pods, From    int
	Prefix        string
	First, Names  int
	Cores, Blocks int64
}

// result is a line of standard output: microseconds of each call by verb, and
// the number of pods that the filter has passed.
type result struct {
	Microseconds map[string][]int64
	Passed       int
}

// calls answers each line with a line. As in kube-scheduler one pod follows
// another, and the connection is kept.
func calls(url string) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var asked round
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			return err
		}
		found, err := asked.run(url)
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(found); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (r round) run(url string) (result, error) {
	found := result{Microseconds: map[string][]int64{}}
	names := make([]string, r.Names)
	for i := range names {
		names[i] = fmt.Sprintf("%s%05d", r.Prefix, r.First+i)
	}
	for i := range r.Pods {
		asked := pod("bench", fmt.Sprintf("call-%d", r.From+i), r.Cores, r.Blocks, false)
		passed, chosen := true, ""
		for _, verb := range r.Verbs {
			var body any = api.ExtenderArgs{Pod: asked, NodeNames: &names}
			if verb == "bind" {
				if !passed {
					continue
				}
				body = api.ExtenderBindingArgs{PodName: asked.Name, PodNamespace: asked.Namespace, PodUID: asked.UID, Node: chosen}
			}
			answer, took, err := call(url+"/"+verb, body)
			if err != nil {
				return found, err
			}
			found.Microseconds[verb] = append(found.Microseconds[verb], took.Microseconds())
			if verb == "filter" {
				var filtered api.ExtenderFilterResult
				if err := json.Unmarshal(answer, &filtered); err != nil {
					return found, err
				}
				if passed = filtered.NodeNames != nil && len(*filtered.NodeNames) > 0; passed {
					found.Passed++
					chosen = (*filtered.NodeNames)[0]
				}
			}
		}
	}
	return found, nil
}

// call measures from the first byte of the request to the last of the answer.
func call(url string, body any) ([]byte, time.Duration, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, 0, err
	}
	begun := time.Now()
	response, err := http.Post(url, "application/json", bytes.NewReader(text))
	if err != nil {
		return nil, 0, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, response.Status, answer)
	}
	return answer, time.Since(begun), err
}
